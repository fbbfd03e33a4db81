"""Who reads from a copy that is being withdrawn goes on at another one with the same bytes, if that costs nothing."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Done,
    Filling,
    LeaseFailure,
    Ok,
    Promise,
    Published,
    Relocate,
    SourceSlow,
)
from tests.sim.hub import Hub, Peer

SUMS, SEGMENTS = b"sums", 10


def holder(hub: Hub, name: str, **place: str) -> Peer:
    peer = hub.hello(name, **place)
    peer.register(b"a", SEGMENTS)
    peer.publish(1, SUMS, Published, held_epoch=None if name == "trainer" else 1)
    return peer


def reader(hub: Hub, name: str, segments: int) -> Peer:
    """A reader that has verified the first segments."""
    peer = hub.hello(name)
    peer.register(b"a", SEGMENTS)
    (source,) = peer.answer(peer.join(0), Promise).sources
    assert source.replica == "trainer"
    peer.call(Filling(0), Ok)
    peer.call(Announce(0, segments, 100 * segments), Ok)
    return peer


def leave(peer: Peer) -> str:
    """Do as told; return whom it reads from then."""
    (told,) = peer.pushed(SourceSlow)
    (source,) = peer.call(Relocate(0, (LeaseFailure(told.lease, "slow"),)), Promise).sources
    return source.replica


def test_a_reader_goes_on_at_another_holder_and_keeps_what_it_has() -> None:
    hub = Hub()
    trainer = holder(hub, "trainer")
    one = reader(hub, "one", 4)
    holder(hub, "idle")
    withdrawn = trainer.unpublish()
    assert one.pushed(SourceSlow) == []
    hub.later(1.0)
    assert leave(one) == "idle"
    trainer.answer(withdrawn, Ok)
    copies = {hub.state.workers[c.worker].replica: c.prefix for c in hub.state.copies.values()}
    assert copies["one"] == 4
    assert one.call(Done(0, one.put(SUMS)), Committed).published
    assert check(hub.state) == []


@pytest.mark.parametrize("why", ["nobody else has it", "it is nearly done", "the other one is read", "it is farther"])
def test_nobody_is_sent_away_where_that_would_cost_something(why: str) -> None:
    hub = Hub()
    trainer = holder(hub, "trainer")
    one = reader(hub, "one", SEGMENTS if why == "it is nearly done" else 4)
    if why != "nobody else has it":
        holder(hub, "other", **({"zone": "far"} if why == "it is farther" else {}))
    if why == "the other one is read":
        late = hub.hello("late")
        late.register(b"a", SEGMENTS)
        late.join(0, prefix=False)
    trainer.unpublish()
    hub.later(3.0)
    assert one.pushed(SourceSlow) == []


def test_each_is_told_once_and_one_at_a_time() -> None:
    hub = Hub()
    trainer = holder(hub, "trainer")
    one = reader(hub, "one", 1)
    holder(hub, "idle")
    trainer.unpublish()
    hub.later(5.0)
    assert len(one.pushed(SourceSlow)) == 1
