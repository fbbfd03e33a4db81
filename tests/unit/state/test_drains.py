"""A copy is withdrawn exactly when nobody can read it any more; who slept through its lease harms nobody (L3, L4)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    LeaseFailure,
    LeaseLost,
    Leave,
    LeaveRound,
    Ok,
    Promise,
    Published,
    Relocate,
    Source,
)
from tensorhub_core.state.records import Copy
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_rounds import publish, trainer


def reading(hub: Hub, name: str = "reader", offer: bool = True) -> tuple[Peer, Promise]:
    """Return a reader that fills what it was promised in round 0."""
    (r,) = trainer(hub, name)
    promise = r.answer(r.join(0, offer=offer), Promise)
    r.call(Filling(0), Ok)
    return r, promise


def holders(promise: Promise | Discard) -> list[str]:
    return sorted(source.replica for source in promise.sources)


def lease_on(promise: Promise, replica: str) -> Source:
    return next(source for source in promise.sources if source.replica == replica)


def filled(hub: Hub, replica: str) -> Copy:
    """Return the copy that a replica of one shard fills."""
    found = [copy for w in hub.state.workers.values() if w.replica == replica and (copy := w.filling()) is not None]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("end", ["commits", "leaves the round", "leaves for good", "falls silent", "goes elsewhere"])
def test_unpublish_returns_exactly_when_its_reader(end: str) -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    r, promise = reading(hub)
    withdrawn = t.unpublish()
    hub.later(3.0)
    assert withdrawn not in t.answers
    if end == "commits":
        r.call(Done(0, r.put(b"sums 1 0")), Committed)
    elif end == "leaves the round":
        r.call(LeaveRound(0, "deadline_exceeded", "too late"), Ok)
    elif end == "leaves for good":
        r.call(Leave(), Ok)
    elif end == "falls silent":
        hub.later(hub.config.lease_s - 1, silent=(r,))
        assert withdrawn not in t.answers
        hub.later(2.0, silent=(r,))
    else:
        (other,) = trainer(hub, "other")
        other.publish(1, b"sums 1 0", Published, held_epoch=1)
        assert holders(r.call(Relocate(0, (LeaseFailure(promise.sources[0].lease, "slow"),)), Promise)) == ["other"]
    t.answer(withdrawn, Ok)
    assert check(hub.state) == []


def test_the_first_shard_that_is_taken_back_ends_the_offer_of_all() -> None:
    hub = Hub()
    t = trainer(hub, shards=2)
    publish(t, 1)
    r = trainer(hub, "reader", 2)
    promise = r[0].answer(r[0].join(0), Promise)
    withdrawn = t[0].unpublish()
    late = trainer(hub, "late", 2)
    assert late[0].answer(late[0].join(0), Failure).code == "version_unavailable"
    assert r[1].answer(r[1].join(0), Promise).number == promise.number, "who was promised it gets it"
    assert withdrawn not in t[0].answers
    for k, p in enumerate(r):
        p.call(Filling(0), Ok)
        p.ask(Done(0, p.put(b"sums 1 %d" % k)))
    t[0].answer(withdrawn, Ok)


@pytest.mark.parametrize("how", ["dies", "leaves", "gives wrong bytes"])
def test_a_promised_reader_is_leased_onto_a_draining_copy_when_its_own_source(how: str) -> None:
    hub = Hub()
    (t,), (other,) = trainer(hub), trainer(hub, "other")
    publish([t], 1)
    busy, _ = reading(hub, "busy", offer=False)
    publish([other], 1)
    r, promise = reading(hub)
    while "trainer" in holders(promise):  # the idle holder alone, or with the other
        promise = r.call(Relocate(0, (LeaseFailure(lease_on(promise, "trainer").lease, "slow"),)), Promise)
    withdrawn = t.unpublish()
    if how == "gives wrong bytes":
        again = r.call(Relocate(0, (LeaseFailure(lease_on(promise, "other").lease, "corrupt"),)), Promise)
    else:
        if how == "dies":
            hub.later(hub.config.dead_after_s + 1, silent=(other,))
        else:
            other.call(Leave(), Ok)
        busy.call(Done(0, busy.put(b"sums 1 0")), Committed)
        busy.call(Leave(), Ok)
        assert len(r.pushed(LeaseLost)) == 1
        assert withdrawn not in t.answers, "the reader has lost its source and may need this one"
        again = r.call(Relocate(0, ()), Promise)
    assert "trainer" in holders(again)
    assert withdrawn not in t.answers
    r.call(Done(0, r.put(b"sums 1 0")), Committed)
    if how == "gives wrong bytes":
        busy.call(Done(0, busy.put(b"sums 1 0")), Committed)
    t.answer(withdrawn, Ok)
    assert check(hub.state) == []


def test_who_slept_through_its_lease_blames_nobody() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    r, promise = reading(hub)
    hub.later(hub.config.lease_s + 1, silent=(r,))
    logs = len(hub.logs)
    again = r.call(Relocate(0, (LeaseFailure(promise.sources[0].lease, "corrupt"),)), Promise)
    assert holders(again) == ["trainer"], "its bytes may have been changed rightly"
    assert not any("corrupt" in line for line in hub.logs[logs:])
    late, _ = reading(hub, "late")
    assert r.call(Done(0, r.put(b"sums 1 0"), corrupt=(promise.sources[0].lease,)), Committed).published
    assert not any("wrong bytes" in line for line in hub.logs[logs:])
    late.call(Done(0, late.put(b"sums 1 0")), Committed)


def test_what_was_read_after_the_lease_had_ended_counts_for_nothing() -> None:
    hub = Hub()
    (t,), (other,) = trainer(hub), trainer(hub, "other")
    publish([t], 1)
    r, _ = reading(hub)
    r.call(Announce(0, 2), Ok)
    follower, followed = reading(hub, "follower")
    assert holders(followed) == ["reader"]
    hub.later(hub.config.lease_s + 1, silent=(r,))
    publish([other], 1)
    r.call(Announce(0, 4), Ok)
    assert filled(hub, "reader").prefix == 0
    assert [lost.lease for lost in follower.pushed(LeaseLost)] == [followed.sources[0].lease]
    discard = r.call(Done(0, r.put(b"sums 1 0")), Discard)
    assert "other" in holders(discard)
    r.call(Announce(0, 1), Ok)
    assert filled(hub, "reader").prefix == 1, "what is read under the new lease counts"
    r.call(Done(0, r.put(b"sums 1 0")), Committed)
    assert check(hub.state) == []


def test_who_wakes_after_its_round_has_ended_changes_nothing() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    r = trainer(hub, "reader", 2)
    for p in r:
        p.register(b"layout a0")
        p.answer(p.join(0), Promise)
        p.call(Filling(0), Ok)
    hub.later(hub.config.lease_s + 1, silent=(r[1],))
    r[0].call(LeaveRound(0, "deadline_exceeded", "too late"), Ok)
    t.answer(t.unpublish(), Ok)
    for late in (Announce(0, 4), Done(0, r[1].put(b"sums 1 0")), Relocate(0, ())):
        r[1].call(late, Failure)
    assert hub.state.leases == {}
    assert hub.state.copies == {}


@pytest.mark.parametrize("slept_s", [4.0, 6.0, 14.0])
def test_a_source_that_slept_is_read_on_under_the_same_lease(slept_s: float) -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    r, _ = reading(hub)
    hub.later(slept_s, silent=(t,))
    assert r.pushed(LeaseLost) == []
    assert r.call(Done(0, r.put(b"sums 1 0")), Committed).published
    t.answer(t.unpublish(), Ok)
