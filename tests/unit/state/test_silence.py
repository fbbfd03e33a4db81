"""A silent worker may only be paused: it gets no new readers, but nothing ends before it is buried (law L4)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    Heartbeat,
    LeaseFailure,
    LeaveRound,
    Ok,
    Promise,
    Published,
    RegisterStaging,
    Relocate,
    RoundAborted,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_rounds import B, fill, publish, trainer


def suspect(hub: Hub, *silent: Peer) -> None:
    """Let time pass until these workers are suspected, and not yet buried."""
    hub.later(hub.config.lease_s + 1, silent=silent)
    for peer in silent:
        assert hub.state.workers[hub.state.sessions[peer.session]].suspected


def bury(hub: Hub, *silent: Peer) -> None:
    hub.later(hub.config.dead_after_s, silent=silent)


def leased(hub: Hub, shards: int = 1) -> tuple[Hub, list[Peer], list[Peer], list[Promise]]:
    """Return a trainer and a reader, both of `shards` shards, that has begun to fill version 1 from it."""
    t, r = trainer(hub, shards=shards), trainer(hub, "reader", shards=shards)
    publish(t, 1)
    asked = [p.join(0) for p in r]
    promises = [p.answer(n, Promise) for p, n in zip(r, asked, strict=True)]
    for p in r:
        p.call(Filling(0), Ok)
    return hub, t, r, promises


def lost(promise: Promise, kind: str = "lost") -> Relocate:
    return Relocate(promise.round, (LeaseFailure(promise.sources[0].lease, kind),))  # type: ignore[arg-type]


@pytest.mark.parametrize("want", [None, 1])
@pytest.mark.parametrize("mode", ["replicate", "update", "stage"])
def test_a_first_promise_waits_for_a_silent_holder(want: int | None, mode: str) -> None:
    hub = Hub()
    t, r = trainer(hub, shards=2), trainer(hub, "reader", shards=2)
    for p in r:
        p.call(RegisterStaging(p.put(b"staging of " + p.session)), Ok)
    publish(t, 1)
    suspect(hub, t[1])
    asked = [p.join(0, want, mode=mode) for p in r]
    hub.later(hub.config.lease_s, silent=(t[1],))
    assert [n in p.answers for p, n in zip(r, asked, strict=True)] == [False, False]
    assert check(hub.state) == []
    t[1].call(Heartbeat(), Ok)
    assert {p.answer(n, Promise).number for p, n in zip(r, asked, strict=True)} == {1}
    assert check(hub.state) == []


def test_a_first_promise_is_refused_when_the_silent_holder_is_buried() -> None:
    hub = Hub()
    t, (r,) = trainer(hub, shards=1), trainer(hub, "reader")
    publish(t, 1)
    suspect(hub, *t)
    asked = r.join(0)
    assert asked not in r.answers
    bury(hub, *t)
    assert r.answer(asked, Failure).code == "version_unavailable"


def test_a_first_promise_is_refused_when_another_shard_of_the_silent_holder_is_gone() -> None:
    hub = Hub()
    t, (r,) = trainer(hub, shards=2), trainer(hub, "reader")
    publish(t, 1)
    suspect(hub, t[0])
    asked = r.join(0)
    t[1].unpublish()
    hub.later(hub.config.heartbeat_s * 2, silent=(t[0],))
    assert r.answer(asked, Failure).code == "version_unavailable"


def test_an_update_that_waits_keeps_the_old_copy_published() -> None:
    hub = Hub()
    t, (r,), (other,) = trainer(hub), trainer(hub, "reader"), trainer(hub, "other")
    publish(t, 1)
    fill(r, 1, r.answer(r.join(0), Promise), b"sums 1 0")
    t[0].answer(t[0].unpublish(), Ok)
    publish(t, 2)
    suspect(hub, *t)
    asked = r.join(1, mode="update", have=(1, 1))
    assert other.answer(other.join(0, 1), Promise).sources[0].replica == "reader"
    hub.later(1.0)
    assert r.answer(asked, Promise).number == 2


@pytest.mark.parametrize("kind", ["lost", "stalled", "slow", "unreachable"])
def test_a_reader_that_lost_its_source_waits_for_it_to_be_heard_again(kind: str) -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    suspect(hub, *t)
    asked = r.ask(lost(promise, kind))
    hub.later(hub.config.lease_s, silent=tuple(t))
    assert asked not in r.answers
    assert r.pushed(RoundAborted) == []
    assert check(hub.state) == []
    t[0].call(Heartbeat(), Ok)
    again = r.answer(asked, Promise)
    assert (again.sources[0].replica, again.sources[0].lease != promise.sources[0].lease) == ("trainer", True)
    assert r.call(Done(0, r.put(b"sums 1 0")), Committed).published


def test_who_gave_wrong_bytes_is_not_waited_for() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    suspect(hub, *t)
    failure = r.call(lost(promise, "corrupt"), Failure)
    assert failure.code == "corrupt_transfer"


def test_a_source_that_lives_and_fails_is_not_waited_for() -> None:
    for kind in ("lost", "unreachable"):
        _, _, (r,), (promise,) = leased(Hub())
        assert r.call(lost(promise, kind), Failure).code == "version_unavailable"


def test_a_source_that_stalls_and_is_heard_again_is_read_once_more_before_it_is_suspected() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    asked = r.ask(lost(promise, "stalled"))
    hub.later(3.0, silent=tuple(t))
    assert asked not in r.answers
    hub.later(hub.config.heartbeat_s)
    again = r.answer(asked, Promise)
    assert again.sources[0].replica == "trainer"
    failure = r.call(lost(again, "stalled"), Failure)
    assert failure.code == "version_unavailable", "it lives, and has stalled twice"


def test_a_source_that_stalls_for_good_is_buried_first() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    asked = r.ask(lost(promise, "stalled"))
    hub.later(hub.config.dead_after_s - 2, silent=tuple(t))
    assert asked not in r.answers
    hub.later(3.0, silent=tuple(t))
    failure = r.answer(asked, Failure)
    assert failure.code == "version_unavailable"
    assert "trainer: stalled" in failure.message


def test_a_source_that_stalled_is_not_taken_where_there_is_another() -> None:
    hub = Hub()
    publish(trainer(hub), 1)
    publish(trainer(hub, "other"), 1)
    (r,) = trainer(hub, "reader")
    one, two = r.answer(r.join(0), Promise).sources
    hub.later(1.0)
    again = r.call(Relocate(0, (LeaseFailure(one.lease, "stalled"),)), Promise)
    assert [source.replica for source in again.sources] == [two.replica]


def test_who_waits_is_told_at_once_when_the_silent_holder_is_buried() -> None:
    hub, t, r, promises = leased(Hub(), shards=2)
    suspect(hub, t[0])
    asked = r[0].ask(lost(promises[0]))
    done = r[1].ask(Done(0, r[1].put(b"sums 1 1")))
    bury(hub, t[0])
    assert r[0].answer(asked, Failure).code == "version_unavailable"
    assert r[1].answer(done, Failure).code == "version_unavailable", "the promise breaks for all shards together"
    assert check(hub.state) == []


def test_another_holder_serves_who_waits() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    suspect(hub, *t)
    asked = r.ask(lost(promise))
    late = hub.hello("late")
    late.register(b"layout a0")
    late.publish(1, b"sums 1 0", Published, held_epoch=1)
    hub.later(hub.config.heartbeat_s, silent=tuple(t))
    assert r.answer(asked, Promise).sources[0].replica == "late"


def test_bytes_that_do_not_count_are_read_again_from_who_was_silent() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    suspect(hub, *t, r)
    asked = r.ask(Done(0, r.put(b"sums 1 0")))
    hub.later(1.0, silent=tuple(t))
    assert asked not in r.answers
    (copy,) = [c for c in hub.state.copies.values() if hub.state.workers[c.worker].replica == "reader"]
    assert copy.prefix == 0, "what does not count is nobody's source"
    t[0].call(Heartbeat(), Ok)
    assert r.answer(asked, Discard).sources[0].lease != promise.sources[0].lease
    assert r.call(Done(0, r.put(b"sums 1 0")), Committed).published


def test_one_answer_is_owed_at_a_time() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    suspect(hub, *t)
    asked = r.ask(lost(promise))
    r.refused(Relocate(0, ()), "state_error")
    r.refused(Done(0, r.put(b"sums 1 0")), "state_error")
    hub.later(1.0)
    r.answer(asked, Promise)


def test_who_waits_until_its_deadline_is_told_who_is_silent() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    (new,) = trainer(hub, "new")
    suspect(hub, *t)
    for peer, asked in ((r, r.ask(lost(promise))), (new, new.join(0))):
        peer.call(LeaveRound(0, "deadline_exceeded", "the deadline passed"), Ok)
        failure = peer.answer(asked, Failure)
        assert failure.code == "deadline_exceeded"
        assert "silent at the moment: trainer" in failure.message


def test_a_reader_does_not_wait_for_ever_for_holders_that_come_and_go() -> None:
    hub, t, r, promises = leased(Hub(), shards=2)
    suspect(hub, *t)
    asked = r[0].ask(lost(promises[0]))
    begun_s = hub.now
    while asked not in r[0].answers and hub.now < begun_s + 10 * hub.config.dead_after_s:
        hub.later(hub.config.lease_s + 1, silent=tuple(t))
        awake = t[int(hub.now) % 2]
        if hub.now < begun_s + hub.config.dead_after_s or awake.session in hub.state.sessions:
            awake.ask(Heartbeat())
            hub.later(0.0)
    failure = r[0].answer(asked, Failure)
    assert hub.now <= begun_s + 2 * hub.config.dead_after_s + 2 * hub.config.lease_s
    assert failure.code in ("deadline_exceeded", "version_unavailable")


def test_a_copy_that_drains_at_a_silent_worker_stays_for_who_waits() -> None:
    hub, t, (r,), (promise,) = leased(Hub())
    withdrawn = t[0].unpublish()
    suspect(hub, *t)
    asked = r.ask(lost(promise))
    hub.later(1.0, silent=tuple(t))
    assert withdrawn not in t[0].answers
    t[0].call(Heartbeat(), Ok)
    assert r.answer(asked, Promise).sources[0].replica == "trainer"
    assert withdrawn not in t[0].answers
    r.call(Done(0, r.put(b"sums 1 0")), Committed)
    t[0].answer(withdrawn, Ok)


def test_a_shard_that_joins_late_waits_for_its_silent_source_too() -> None:
    hub = Hub()
    t, r = trainer(hub, shards=2), trainer(hub, "reader", shards=2)
    publish(t, 1)
    r[0].answer(r[0].join(0), Promise)
    hub.later(hub.config.lease_s + 1, silent=(t[1], r[1]))
    asked = r[1].join(0)
    assert asked not in r[1].answers
    assert r[0].pushed(RoundAborted) == []
    t[1].call(Heartbeat(), Ok)
    assert r[1].answer(asked, Promise).number == 1


def test_a_silent_holder_of_another_layout_that_cannot_be_read_is_not_waited_for() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    t.register(B, portable=False)
    publish([t], 1)
    (r,) = trainer(hub, "reader")
    suspect(hub, t)
    assert r.answer(r.join(0), Failure).code == "version_unavailable"


def test_everybody_is_cut_off_from_the_hub_and_comes_back() -> None:
    hub, t, r, _ = leased(Hub(), shards=2)
    suspect(hub, *t, *r)
    done = [p.ask(Done(0, p.put(b"sums 1 %d" % k))) for k, p in enumerate(r)]
    hub.later(1.0)
    for peer, asked in zip(r, done, strict=True):
        peer.answer(asked, Discard)
    again = [p.ask(Done(0, p.put(b"sums 1 %d" % k))) for k, p in enumerate(r)]
    assert all(p.answer(n, Committed).published for p, n in zip(r, again, strict=True))
    assert check(hub.state) == []
