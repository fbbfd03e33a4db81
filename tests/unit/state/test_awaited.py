"""Readers who ask at the same moment queue behind each other instead of all reading from one holder."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Done,
    Filling,
    LeaseFailure,
    LeaseLost,
    LeaveRound,
    Ok,
    Promise,
    Published,
    RegisterStaging,
    Relocate,
    SourceProgress,
    Unpublish,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_rounds import publish, trainer

LARGE = {"worth_waiting_bytes": 400}
SMALL = {"worth_waiting_bytes": 401}


def world(readers: int, **config: float) -> tuple[Hub, Peer, list[Peer]]:
    """A trainer that has published version 1, and readers that hold nothing."""
    hub = Hub(**config)
    (t,) = trainer(hub)
    publish([t], 1)
    return hub, t, [trainer(hub, f"r{number}")[0] for number in range(readers)]


def source(reader: Peer, number: int) -> str:
    """Return which replica a reader was sent to."""
    (found,) = reader.answer(number, Promise).sources
    return found.replica


def test_who_asks_at_the_same_moment_forms_a_chain() -> None:
    hub, _, readers = world(8, **LARGE)
    asked = [reader.join(0) for reader in readers]
    assert [source(r, n) for r, n in zip(readers, asked, strict=True)] == ["trainer", *(f"r{n}" for n in range(7))]
    assert check(hub.state) == []


def test_small_shards_are_read_from_the_holder_at_once() -> None:
    hub, _, readers = world(4, **SMALL)
    asked = [reader.join(0) for reader in readers]
    assert {source(r, n) for r, n in zip(readers, asked, strict=True)} == {"trainer"}
    readers[0].call(Filling(0), Ok)
    (late,) = trainer(hub, "late")
    assert source(late, late.join(0)) == "r0", "whoever has begun is as good as any"


def test_a_reader_in_the_queue_hears_when_its_source_begins() -> None:
    hub, _, (a, b) = world(2, **LARGE)
    a.join(0)
    promised = b.answer(b.join(0), Promise).sources[0]
    assert (promised.replica, promised.whole, promised.prefix) == ("r0", False, 0)
    b.call(Filling(0), Ok)
    a.call(Filling(0), Ok)
    a.call(Announce(0, 2), Ok)
    assert b.pushed(SourceProgress) == [SourceProgress(promised.lease, 2, False)]
    a.call(Done(0, a.put(b"sums 1 0")), Committed)
    assert b.pushed(SourceProgress)[-1] == SourceProgress(promised.lease, 4, True)
    b.call(Done(0, b.put(b"sums 1 0")), Committed)
    assert check(hub.state) == []


@pytest.mark.parametrize("how", ["leaves", "dies", "registers other memory", "reads another layout now"])
def test_a_source_that_never_begins_is_replaced(how: str) -> None:
    hub, _, (a, b, c) = world(3, **LARGE)
    own = a.answer(a.join(0), Promise).sources[0].lease
    lease = b.answer(b.join(0), Promise).sources[0].lease
    assert source(c, c.join(0)) == "r1"
    if how == "leaves":
        a.call(LeaveRound(0, "deadline_exceeded", ""), Ok)
    elif how == "dies":
        hub.later(20.0, silent=(a,))
    elif how == "registers other memory":
        a.register(b"another layout")
    else:
        other = hub.hello("boxed")
        other.register(b"boxed layout")
        other.publish(1, b"boxed sums", Published, held_epoch=1)
        assert source(a, a.ask(Relocate(0, (LeaseFailure(own, "stalled"),)))) == "boxed"
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [lease]
    assert c.pushed(LeaseLost) == [], "whose own source lives hears nothing"
    assert source(b, b.ask(Relocate(0, ()))) == "trainer"
    assert check(hub.state) == []


def test_a_copy_that_is_not_offered_is_not_awaited() -> None:
    _, _, (a, b) = world(2, **LARGE)
    a.join(0, offer=False)
    assert source(b, b.join(0)) == "trainer"


def test_who_does_not_verify_every_segment_is_read_only_when_it_is_complete() -> None:
    hub, t, (a, b, c) = world(3, **LARGE)
    a.join(0, prefix=False)
    assert source(b, b.join(0)) == "trainer"
    a.call(Filling(0), Ok)
    a.call(Announce(0, 3), Ok)
    b.call(LeaveRound(0, "deadline_exceeded", ""), Ok)
    assert source(b, b.join(1)) == "trainer"
    assert a.call(Done(0, a.put(b"sums 1 0")), Committed).published
    t.ask(Unpublish())
    assert source(c, c.join(0)) in ("r0", "r1")
    assert check(hub.state) == []


def test_a_stage_is_awaited_in_its_own_memory() -> None:
    hub, _, (a, b) = world(2, **LARGE)
    placement = a.put(b"staging of a")
    a.call(RegisterStaging(placement), Ok)
    a.join(0, mode="stage")
    promised = b.answer(b.join(0), Promise).sources[0]
    assert (promised.replica, promised.placement) == ("r0", placement)
    a.call(Filling(0), Ok)
    a.call(Announce(0, 3), Ok)
    assert b.pushed(SourceProgress)[-1].prefix == 3
    assert check(hub.state) == []


def test_the_publisher_is_held_until_the_head_of_the_queue_is_whole() -> None:
    hub, t, (a, b) = world(2, **LARGE)
    a.join(0)
    b.join(0)
    withdrawn = t.unpublish()
    b.call(Filling(0), Ok)
    a.call(Filling(0), Ok)
    assert withdrawn not in t.answers
    a.call(Done(0, a.put(b"sums 1 0")), Committed)
    t.answer(withdrawn, Ok)
    b.call(Done(0, b.put(b"sums 1 0")), Committed)
    assert check(hub.state) == []
