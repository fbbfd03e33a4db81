"""Readers ask their sources for checksums of cuts through the server: who may ask, who may answer, how it ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tensorhub_core.state.bounds import PACKED_CUT_BYTES
from tensorhub_core.state.events import Disconnected
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    AskSums,
    Failure,
    Filling,
    GiveSums,
    LeaseFailure,
    Leave,
    LeaveRound,
    Ok,
    Promise,
    Published,
    Relocate,
    Source,
    SumsGiven,
    SumsWanted,
    Unpublish,
)
from tests.sim.hub import Hub, Peer

SUMS = b"sums 1"
CUTS = bytes(2 * PACKED_CUT_BYTES)
RIGHT = b"0123456789abcdef"


@dataclass
class Scene:
    """A trainer with two shards, another with the same, and a reader of another layout that reads from one of them."""

    hub: Hub
    trainers: dict[str, list[Peer]]
    reader: Peer
    sources: tuple[Source, ...]

    @property
    def source(self) -> Peer:
        """Return the worker under the first lease."""
        return self.trainers[self.sources[0].replica][self.sources[0].shard]

    def ask(self, cuts: bytes = CUTS, lease: str | None = None) -> int:
        return self.reader.ask(AskSums(0, lease or self.sources[0].lease, cuts))

    def wanted(self) -> list[SumsWanted]:
        assert check(self.hub.state) == []
        return self.source.pushed(SumsWanted)


def scene(**config: object) -> Scene:
    hub = Hub(**config)  # type: ignore[arg-type]
    trainers: dict[str, list[Peer]] = {}
    for name in ("one", "two"):
        trainers[name] = [hub.hello(name, shard=shard, num_shards=2) for shard in (0, 1)]
        for shard, peer in enumerate(trainers[name]):
            peer.register(b"layout %d" % shard)
            peer.publish(1, SUMS + b" %d" % shard, Published)
    reader = hub.hello("reader")
    reader.register(b"another layout")
    promise = reader.answer(reader.join(0), Promise)
    reader.call(Filling(0), Ok)
    return Scene(hub, trainers, reader, promise.sources)


def test_a_question_goes_to_the_holder_of_the_leased_copy_and_its_answer_back() -> None:
    world = scene()
    request = world.ask()
    (wanted,) = world.wanted()
    source = world.sources[0]
    assert (wanted.cuts, wanted.placement, wanted.sums) == (CUTS, source.placement, source.sums)
    assert request not in world.reader.answers
    world.source.call(GiveSums(wanted.ticket, RIGHT), Ok)
    assert world.reader.answer(request, SumsGiven) == SumsGiven(RIGHT)
    assert not world.hub.state.tickets
    world.source.call(GiveSums(wanted.ticket, RIGHT), Ok)


@pytest.mark.parametrize("refusal", ["wait", "unable", "corrupt"])
def test_a_refusal_reaches_the_reader(refusal: str) -> None:
    world = scene()
    request = world.ask()
    (wanted,) = world.wanted()
    world.source.call(GiveSums(wanted.ticket, b"", refusal, "segment 3"), Ok)  # type: ignore[arg-type]
    assert world.reader.answer(request, SumsGiven) == SumsGiven(b"", refusal, "segment 3")  # type: ignore[arg-type]


def test_nobody_else_can_answer_and_odd_answers_are_dropped() -> None:
    world = scene()
    request = world.ask()
    (wanted,) = world.wanted()
    others = [peer for peers in world.trainers.values() for peer in peers if peer is not world.source]
    for peer in (*others, world.reader):
        peer.call(GiveSums(wanted.ticket, RIGHT), Ok)
    for odd in (b"", RIGHT[:-1], RIGHT + bytes(8), RIGHT[:8]):
        world.source.call(GiveSums(wanted.ticket, odd), Ok)
    world.source.call(GiveSums(wanted.ticket, RIGHT, "wait"), Ok)
    world.source.call(GiveSums("t1.999", RIGHT), Ok)
    assert request not in world.reader.answers
    assert check(world.hub.state) == []
    world.source.call(GiveSums(wanted.ticket, RIGHT), Ok)
    assert world.reader.answer(request, SumsGiven).sums == RIGHT


def test_only_the_reader_of_a_living_lease_can_ask() -> None:
    world = scene()
    lease = world.sources[0].lease
    thief = world.hub.hello("thief")
    thief.register(b"another layout")
    thief.answer(thief.join(0), Promise)
    for who, round_, which in ((thief, 0, lease), (world.reader, 1, lease), (world.reader, 0, "l1.999")):
        who.answer(who.ask(AskSums(round_, which, CUTS)), Failure)
    observer = world.hub.hello("watcher", observer=True)
    observer.answer(observer.ask(AskSums(0, lease, CUTS)), Failure)
    assert not world.wanted()
    for cuts in (b"", CUTS[:-1]):
        world.reader.answer(world.ask(cuts), Failure)


def test_what_is_open_is_bounded_and_counted_down() -> None:
    world = scene(max_tickets_of_lease=2, max_tickets_of_worker=3)
    asked = [world.ask() for _ in range(3)]
    assert world.reader.answer(asked[2], SumsGiven).refusal == "wait"
    first, _ = world.wanted()
    world.source.call(GiveSums(first.ticket, RIGHT), Ok)
    again = world.ask()
    assert again not in world.reader.answers
    assert len(world.hub.state.tickets) == 2


def test_all_readers_together_are_bounded() -> None:
    world = scene(max_tickets=1)
    world.ask()
    refused = world.ask(lease=world.sources[1].lease)
    assert world.reader.answer(refused, SumsGiven).refusal == "wait"


@pytest.mark.parametrize("how", ["leaves the round", "leaves", "looks elsewhere", "source leaves"])
def test_a_question_ends_with_its_lease(how: str) -> None:
    world = scene()
    request = world.ask()
    (wanted,) = world.wanted()
    if how == "leaves the round":
        world.reader.ask(LeaveRound(0, "state_error", "over"))
    elif how == "leaves":
        world.reader.ask(Leave())
    elif how == "looks elsewhere":
        world.reader.ask(Relocate(0, (LeaseFailure(world.sources[0].lease, "stalled"),)))
    else:
        world.source.ask(Leave())
    assert not world.hub.state.tickets
    assert check(world.hub.state) == []
    if how != "leaves":
        world.reader.answer(request, Failure)
    if how != "source leaves":
        world.source.call(GiveSums(wanted.ticket, RIGHT), Ok)
    assert check(world.hub.state) == []


def test_a_source_that_loses_its_connection_is_asked_again_later() -> None:
    world = scene()
    request = world.ask()
    world.wanted()
    world.hub.feed(Disconnected(world.source.session))
    assert world.reader.answer(request, SumsGiven).refusal == "wait"
    assert world.reader.answer(world.ask(), SumsGiven).refusal == "wait", "it cannot be reached now"
    assert check(world.hub.state) == []


def test_a_reader_that_comes_back_asks_again() -> None:
    world = scene()
    world.ask()
    (wanted,) = world.wanted()
    world.hub.feed(Disconnected(world.reader.session))
    assert not world.hub.state.tickets
    world.source.call(GiveSums(wanted.ticket, RIGHT), Ok)
    assert check(world.hub.state) == []


def test_a_draining_copy_answers_those_who_read_it_and_goes_with_the_last_lease() -> None:
    world = scene()
    unpublish = world.source.ask(Unpublish())
    request = world.ask()
    (wanted,) = world.wanted()
    world.source.call(GiveSums(wanted.ticket, RIGHT), Ok)
    assert world.reader.answer(request, SumsGiven).sums == RIGHT
    assert unpublish not in world.source.answers
    world.reader.ask(LeaveRound(0, "state_error", "over"))
    world.source.answer(unpublish, Ok)
