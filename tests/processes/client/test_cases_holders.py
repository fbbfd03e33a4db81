"""Holders that fill, end or break while others follow them: what followers get, from whom, and who is no holder."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core import StateError, VersionUnavailable, Worker
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import LEASE_S, Hub, nothing_retained
from tests.processes.client.samples import Tensors, blank, digest, make, same
from tests.processes.client.test_faults import BY, KILLED, NIXL, SMALL, STOPPED, Brake, each_way, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
MIB = 24
TOTAL_BYTES = sum(tensor.nbytes for tensor in make("plain", 1, mib=MIB).values())


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def filled_bytes(tensors: Tensors, truth: Tensors) -> int:
    """Count the bytes that are no longer blank; every one of them has to be right."""
    count = 0
    for name in tensors:
        got, right = (each[name].reshape(-1).view(torch.uint8).numpy() for each in (tensors, truth))
        written = got != 0xA5
        assert (got[written] == right[written]).all()
        count += int(np.count_nonzero(written))
    return count


def held_at_half(actor: Actor, reading: Future[Any]) -> int:
    """Wait until a reader in another process holds at half; return how many bytes it has verified."""
    while True:
        assert not reading.done(), reading.exception()
        _, done, total, _ = actor.events.get(timeout=30)
        if done >= total // 2:
            return int(done)


def at_rest(tensors: Tensors, truth: Tensors) -> int:
    """Wait until nothing more comes into the memory of a follower; return what has."""
    before, now = -1, 0
    end = time.monotonic() + 30
    while now == 0 or now != before:
        assert time.monotonic() < end
        time.sleep(0.3)
        before, now = now, filled_bytes(tensors, truth)
    return now


@each_way
@pytest.mark.parametrize("how", ["replicate", "stage"])
def test_who_follows_a_reader_that_is_killed_goes_on_from_the_publisher(
    here: Hub, other: Actor, way: str, how: str
) -> None:
    settings, truth = BY[way], make("plain", 1, mib=MIB)
    here.publisher(other, "plain", mib=MIB, settings=settings)
    with Actor() as middle:
        handle = here.remote(middle, "middle", settings=settings)
        middle.do("register", handle, sample="plain", seed=1, mib=MIB, blank=True)
        begun = {"timeout_s": 60, "hold": True}
        filling = (
            middle.begin("stage", handle, **begun)
            if how == "stage"
            else middle.begin("call", handle, method="replicate", **begun)
        )
        mark = held_at_half(middle, filling)
        last, tensors = here.reader("plain", "last", mib=MIB, settings=settings)
        heard: list[tuple[int, str]] = []
        reading = in_background(lambda: last.replicate(timeout_s=60, progress=lambda d, t, s: heard.append((d, s))))
        got = at_rest(tensors, truth)
        assert 0 < got <= mark, "a follower never passes what its source has verified"
        assert {source for _, source in heard} == {"middle"}
        middle.kill()
        assert reading.result(60) == 1
    assert same(tensors, truth)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard), "it went on at its offset"
    assert heard[-1] == (TOTAL_BYTES, "trainer")
    assert last.counters.failovers == 1
    assert last.counters.bytes_read == TOTAL_BYTES, "nothing was read twice"


@each_way
def test_who_comes_half_way_reads_from_the_end_of_the_chain(here: Hub, other: Actor, way: str) -> None:
    """That costs the others nothing: nobody gets a second reader, nobody is told to change."""
    settings = BY[way]
    here.publisher(other, "plain", mib=MIB, settings=settings)
    names, heard, readers, calls, brake = ("a", "b", "c"), {}, {}, {}, Brake()
    for name in names:
        worker, tensors = here.reader("plain", name, mib=MIB, settings=settings)
        sources: list[str] = []
        heard[name], readers[name] = sources, (worker, tensors)

        def report(done: int, total: int, source: str, name: str = name) -> None:
            heard[name].append(source)
            if name == "a":
                brake(done, total, source)

        calls[name] = in_background(lambda w=worker, f=report: w.replicate(progress=f))  # type: ignore[misc]
        if name == "a":
            assert brake.half.wait(60)
        else:
            until(lambda sources=sources: bool(sources))  # type: ignore[misc]
    brake.go.set()
    for name in names:
        worker, tensors = readers[name]
        assert calls[name].result(60) == 1
        assert same(tensors, make("plain", 1, mib=MIB))
        assert (worker.counters.failovers, worker.counters.bytes_read) == (0, TOTAL_BYTES)
    assert {name: set(sources) for name, sources in heard.items()} == {"a": {"trainer"}, "b": {"a"}, "c": {"b"}}


def pair(here: Hub, replica: str, settings: dict[str, Any], like: int | None = None) -> list[tuple[Worker, Tensors]]:
    """Connect both shards of a replica; `like`: blank ones."""
    made = []
    for shard in (0, 1):
        worker = here.worker(replica, shard=shard, num_shards=2, settings=settings)
        tensors = make("plain", 1 + shard, mib=MIB)
        worker.register(tensors := tensors if like is None else blank(tensors))
        made.append((worker, tensors))
    return made


@nothing_retained
@each_way
def test_a_finished_shard_of_a_replica_that_breaks_is_no_holder(here: Hub, way: str) -> None:
    settings = BY[way]
    trainers = pair(here, "trainer", settings)
    for worker, _ in trainers:
        worker.publish(1)
    finished = here.worker("broken", shard=0, num_shards=2, settings=settings)
    finished.register(blank(make("plain", 1, mib=MIB)))
    with Actor() as actor:
        place = {"server": here.server.address, "model": here.model, "replica": "broken", "shard": 1, "num_shards": 2}
        actor.do("connect", "other shard", settings=settings, **place)
        actor.do("register", "other shard", sample="plain", seed=2, mib=MIB, blank=True)
        theirs = actor.begin("call", "other shard", method="replicate", hold=True)
        done: list[int] = []
        ours = in_background(lambda: finished.replicate(progress=lambda d, t, s: done.append(d)))
        held_at_half(actor, theirs)
        until(lambda: bool(done) and done[-1] == TOTAL_BYTES)

        readers, sources, brake = pair(here, "next", settings, like=1), ([], []), Brake()  # type: ignore[var-annotated]

        def report(shard: int) -> Callable[[int, int, str], None]:
            def heard(done: int, total: int, source: str) -> None:
                sources[shard].append(source)
                if shard == 0:
                    brake(done, total, source)

            return heard

        calls = [in_background(lambda k=k: readers[k][0].replicate(progress=report(k))) for k in (0, 1)]  # type: ignore[misc]
        assert brake.half.wait(60)
        assert set(sources[0]) == {"broken"}, "a finished shard serves the readers of its shard"
        assert [info.replicas for info in finished.versions()] == [("trainer",)], "and is no holder"
        actor.kill()
        with pytest.raises(StateError, match="shard 1"):
            ours.result(60)
        assert finished.version is None
        with pytest.raises(StateError, match="dirty"):
            finished.publish(1)
        brake.go.set()
        assert [call.result(60) for call in calls] == [1, 1]
    assert sources[0][-1] == "trainer", "its lease has ended with the round"
    for shard, (worker, tensors) in enumerate(readers):
        assert same(tensors, make("plain", 1 + shard, mib=MIB))
        reads = 1 + worker.counters.discards  # what was complete when its lease had ended already is read again
        assert worker.counters.bytes_read < (reads + 0.5) * TOTAL_BYTES
    assert [set(info.replicas) for info in finished.versions()] == [{"next", "trainer"}]
    for worker, _ in (*trainers, *readers):
        worker.unpublish()
    late = pair(here, "late", settings, like=1)
    calls = [in_background(lambda w=worker: w.replicate(1, timeout_s=20)) for worker, _ in late]  # type: ignore[misc]
    assert [type(call.exception(30)) for call in calls] == [VersionUnavailable] * 2


@pytest.mark.parametrize(
    ("how", "way"),
    [
        *((KILLED, "auto"), (KILLED, "tcp"), (STOPPED, "tcp")),
        *(pytest.param(how, *NIXL.values, marks=NIXL.marks) for how in (KILLED, STOPPED)),
    ],
)
def test_a_stage_whose_only_source_is_gone_leaves_everything_as_it_was(
    here: Hub, other: Actor, how: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # shared memory is read from a stopped process without its help
    settings = BY[way]
    trainer = here.publisher(other, "plain", mib=MIB, settings=settings)
    holder, tensors = here.reader("plain", mib=MIB, settings=settings)
    assert holder.replicate() == 1
    other.do("call", trainer, method="unpublish")
    old = make("plain", 1, mib=MIB)
    with Actor() as only:
        here.publisher(only, "plain", version=2, seed=2, replica="only", mib=MIB, settings=settings)
        brake = Brake()
        staging = in_background(lambda: holder.stage(timeout_s=40, progress=brake))
        assert brake.half.wait(60)
        only.signal(how)
        brake.go.set()
        with pytest.raises(VersionUnavailable, match="only"):
            staging.result(60)
        assert holder.version == 1
        if how == STOPPED:
            only.signal(18)
            time.sleep(1.0)
        assert same(tensors, old)
        reader = here.remote(other, "late", settings=settings)
        other.do("register", reader, sample="plain", seed=1, blank=True, mib=MIB)
        assert other.do("call", reader, method="replicate", version=1) == 1, "the old version is served"
        assert other.do("digest", reader) == digest(old)
        only.kill()
    other.do("register", trainer, sample="plain", seed=3, mib=MIB)
    other.do("call", trainer, method="publish", version=3)
    with holder.stage(timeout_s=30) as staged:
        assert staged.install() == 3
    assert same(tensors, make("plain", 3, mib=MIB))


@pytest.mark.parametrize(
    ("how", "way"), [(KILLED, "auto"), (STOPPED, "tcp"), pytest.param(STOPPED, "nixl", marks=NIXL.marks)]
)
def test_who_dies_while_it_stages_does_not_keep_a_publisher_from_its_memory(here: Hub, how: int, way: str) -> None:
    settings = {**SMALL, "transport": way}
    trainer = here.worker("trainer", settings=settings)
    trainer.register(make("plain", 1, mib=MIB))
    trainer.publish(1)
    with Actor() as rollout:
        handle = here.remote(rollout, "rollout", settings=settings)
        rollout.do("register", handle, sample="plain", seed=1, mib=MIB, blank=True)
        held_at_half(rollout, rollout.begin("stage", handle, hold=True))
        rollout.signal(how)
        begun = time.monotonic()
        trainer.unpublish(timeout_s=30)
        assert time.monotonic() - begun < 6 * LEASE_S
        rollout.kill()
