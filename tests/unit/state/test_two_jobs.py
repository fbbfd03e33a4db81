"""Two jobs that publish under one model's name: one of them is told, and no stream of versions holds both's (L10)."""

from __future__ import annotations

import random

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import Failure, Held, Hello, Ok, Promise, Publish, Published, Superseded, Welcome
from tests.sim.hub import PROTOCOL, Hub, Peer, digest


class Job:
    """A trainer that counts by one and stops when it is told that something is wrong."""

    def __init__(self, hub: Hub, name: str, replica: str, stream: str | None, start: int) -> None:
        self.name, self.number = name.encode(), start
        self.peer: Peer = hub.hello(replica, stream=stream)
        self.peer.register(b"the layout of both")
        self.published: list[tuple[int, int]] = []
        self.told = ""

    def step(self) -> None:
        """Publish the next version."""
        if self.peer.pushed(Superseded):
            self.told = "superseded"
            return
        if self.published:
            self.peer.answer(self.peer.unpublish(), Ok)
        sums = self.peer.put(self.name + b" %d" % self.number)
        answer = self.peer.answers[self.peer.ask(Publish(self.number, sums))]
        if isinstance(answer, Published):
            self.published.append((answer.epoch, answer.number))
            self.number += 1
        else:
            assert isinstance(answer, Failure)
            assert answer.code == "version_conflict"
            assert "stream" in answer.message
            self.told = answer.message


@pytest.mark.parametrize("streams", [(None, None), ("a", "b"), (None, "b"), ("a", None), ("a", "a")])
@pytest.mark.parametrize("names", [("one", "two"), ("trainer", "trainer")])
@pytest.mark.parametrize("starts", [(0, 0), (0, 3), (3, 0)])
def test_one_of_two_jobs_is_told_and_the_other_goes_on_alone(
    streams: tuple[str | None, str | None], names: tuple[str, str], starts: tuple[int, int]
) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        hub = Hub(retain=0)
        jobs = [Job(hub, "first", names[0], streams[0], starts[0])]
        for _ in range(chance.randrange(1, 4)):
            jobs[0].step()
        jobs.append(Job(hub, "second", names[1], streams[1], starts[1]))
        for _ in range(40):
            running = [job for job in jobs if not job.told]
            if running:
                chance.choice(running).step()
            assert check(hub.state) == []
        told = [job for job in jobs if job.told]
        if names[0] == names[1]:
            assert jobs[0].told == "superseded"
        else:
            assert len(told) == 1, "one is told, the other is not disturbed"
        mine, others = ({epoch for epoch, _ in job.published} for job in jobs)
        if streams[1] == "b":
            assert (told, mine & others) == (jobs[:1], set()), "a new stream wins and has an epoch of its own"
        assert not set(jobs[0].published) & set(jobs[1].published)


def test_a_restarted_server_still_tells_the_job_without_a_stream() -> None:
    hub = Hub(server_epoch=2)
    trainers = []
    for name, stream, epoch in (("one", None, 1), ("two", "b", 2)):
        peer = hub.peer(name)
        held = Held(epoch, 3, digest(b"layout"), digest(b"memory of " + name.encode()), digest(b"x"), 400, 4)
        hello = Hello(PROTOCOL, name, "policy", name, stream=stream, held=held, high=(epoch, 3))
        peer.call(hello, Welcome)
        trainers.append(peer)
    asked = [peer.unpublish() for peer in trainers]
    hub.later(hub.config.grace_s + 1)
    for peer, number in zip(trainers, asked, strict=True):
        peer.answer(number, Ok)
        peer.register(b"layout")
    assert "'b'" in trainers[0].publish(4, b"y", Failure).message
    assert trainers[1].publish(4, b"z", Published).epoch == 2


def test_who_follows_a_job_hears_of_the_other_ones_stream_as_a_new_epoch() -> None:
    hub = Hub()
    first = Job(hub, "first", "one", "a", 7)
    first.step()
    reader = hub.hello("reader")
    reader.register(b"the layout of both")
    before = reader.answer(reader.join(0), Promise)
    late = hub.hello("late")
    late.register(b"the layout of both")
    Job(hub, "second", "two", "b", 0).step()
    after = late.answer(late.join(0), Promise)
    assert ((before.epoch, before.number), (after.epoch, after.number)) == ((1, 7), (2, 0))


def test_equal_numbers_in_two_layouts_from_two_trainers_are_doubted_in_the_log() -> None:
    hub = Hub(retain=0)
    for name in ("one", "two"):
        peer = hub.hello(name)
        peer.register(b"the layout of %s" % name.encode())
        peer.publish(0, name.encode(), Published)
    told = [text for text in hub.logs if "two jobs" in text]
    assert len(told) == 1
    assert "'one'" in told[0]
    assert "'two'" in told[0]


def test_the_shards_of_one_trainer_and_equal_trainers_are_not_doubted() -> None:
    hub = Hub(retain=0)
    for name in ("one", "two"):
        for shard in range(2):
            peer = hub.hello(name, shard, 2)
            peer.register(b"layout %d" % shard)
            peer.publish(0, b"%d" % shard, Published)
    assert [text for text in hub.logs if "two jobs" in text] == []
