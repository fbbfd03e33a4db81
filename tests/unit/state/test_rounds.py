"""Rounds of the server machine: promises, leases, commits and what breaks them (laws L1-L4, L13)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.messages import (
    Announce,
    Available,
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    LeaseFailure,
    LeaseLost,
    LeaveRound,
    NothingNewer,
    Ok,
    Promise,
    Published,
    Relocate,
    RoundAborted,
    SourceProgress,
)
from tests.sim.hub import Hub, Peer

A, B = b"layout a", b"layout b"


def trainer(hub: Hub, name: str = "trainer", shards: int = 1, layout: bytes = A) -> list[Peer]:
    peers = [hub.hello(name, k, shards) for k in range(shards)]
    for k, p in enumerate(peers):
        p.register(layout + b"%d" % k)
    return peers


def publish(peers: list[Peer], number: int) -> None:
    for k, p in enumerate(peers):
        p.publish(number, b"sums %d %d" % (number, k), Published)


def fill(peer: Peer, number: int, promise: Promise, sums: bytes) -> int:
    """Read a promised version at once; return the number of the Done request."""
    peer.call(Filling(promise.round), Ok)
    return peer.ask(Done(promise.round, peer.put(sums)))


def test_a_version_is_visible_only_when_its_last_shard_is_published() -> None:
    hub = Hub()
    t = trainer(hub, shards=2)
    r = trainer(hub, "reader", shards=2)
    t[0].publish(9, b"sums 9 0", Published)
    asked = [p.join(0) for p in r]
    explicit = hub.hello("other", 0, 1)
    explicit.register(A + b"0")
    wanted = explicit.join(0, 9)
    assert asked[0] not in r[0].answers
    assert asked[1] not in r[1].answers
    assert wanted not in explicit.answers
    t[1].publish(9, b"sums 9 1", Published)
    for k in (0, 1):
        promise = r[k].answer(asked[k], Promise)
        assert (promise.number, promise.sources[0].replica, promise.sources[0].shard) == (9, "trainer", k)
    assert explicit.answer(wanted, Promise).number == 9


def test_shards_that_ask_around_a_publish_get_one_version() -> None:
    hub = Hub()
    first, second = trainer(hub), trainer(hub, "second")
    publish(first, 7)
    r = trainer(hub, "reader", shards=2)
    r[0].register(A + b"0")
    r[1].register(A + b"0")
    promise = r[0].answer(r[0].join(0), Promise)
    publish(second, 8)
    assert promise.number == 7
    assert r[1].answer(r[1].join(0), Promise).number == 7


def test_commit_waits_for_every_shard() -> None:
    hub = Hub()
    publish(t := trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", shards=2)
    promises = [p.answer(p.join(0), Promise) for p in r]
    first = fill(r[0], 0, promises[0], b"sums 1 0")
    assert first not in r[0].answers
    second = fill(r[1], 0, promises[1], b"sums 1 1")
    assert r[0].answer(first, Committed).published
    assert r[1].answer(second, Committed).published
    for p in t:
        p.answer(p.unpublish(), Ok)
    late = trainer(hub, "late", shards=2)
    assert late[0].answer(late[0].join(0), Promise).sources[0].replica == "reader"


def test_unpublish_waits_for_its_readers_and_sends_it_no_new_one() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (r,) = trainer(hub, "reader")
    promise = r.answer(r.join(0), Promise)
    asked = t.unpublish()
    assert asked not in t.answers
    (late,) = trainer(hub, "late")
    assert late.answer(late.join(0), Failure).code == "version_unavailable"
    done = fill(r, 0, promise, b"sums 1 0")
    r.answer(done, Committed)
    t.answer(asked, Ok)


def test_a_killed_reader_blocks_unpublish_no_longer_than_its_lease() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (r,) = trainer(hub, "reader")
    r.answer(r.join(0), Promise)
    asked = t.unpublish()
    hub.later(hub.config.lease_s - 0.5, silent=(r,))
    assert asked not in t.answers
    hub.later(1.0, silent=(r,))
    t.answer(asked, Ok)


def test_a_slow_reader_that_wakes_up_must_read_again() -> None:
    hub = Hub()
    (t,), (other,) = trainer(hub), trainer(hub, "other")
    publish([t], 1)
    publish([other], 1)
    (r,) = trainer(hub, "reader")
    promise = r.answer(r.join(0), Promise)
    r.call(Filling(0), Ok)
    hub.later(hub.config.lease_s + 1, silent=(r,))
    asked = t.unpublish(), other.unpublish()
    t.answer(asked[0], Ok)
    other.answer(asked[1], Ok)
    t.publish(2, b"sums 2 0", Published)
    failure = r.call(Done(promise.round, r.put(b"sums 1 0")), Failure)
    assert failure.code == "version_unavailable"


def test_done_is_a_question() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (r,) = trainer(hub, "reader")
    promise = r.answer(r.join(0), Promise)
    r.call(Filling(0), Ok)
    hub.later(hub.config.lease_s + 1, silent=(r,))
    discard = r.call(Done(0, r.put(b"sums 1 0")), Discard)
    assert discard.sources[0].lease != promise.sources[0].lease
    r.call(Done(0, r.put(b"sums 1 0")), Committed)


def test_a_dead_source_is_replaced_and_only_then_the_round_breaks() -> None:
    hub = Hub()
    (t,), (other,) = trainer(hub), trainer(hub, "other")
    publish([t], 1)
    publish([other], 1)
    (r,) = trainer(hub, "reader")
    promise = r.answer(r.join(0), Promise)
    r.call(Filling(0), Ok)
    failed = LeaseFailure(promise.sources[0].lease, "lost")
    again = r.call(Relocate(0, (failed,)), Promise)
    assert {promise.sources[0].replica, again.sources[0].replica} == {"trainer", "other"}
    failed = LeaseFailure(again.sources[0].lease, "lost")
    failure = r.call(Relocate(0, (failed,)), Failure)
    assert failure.code == "version_unavailable"
    assert "trainer" in failure.message
    r.refused(Done(0, r.put(b"x")), "state_error")


def test_corruption_of_the_only_source_is_named() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (r,) = trainer(hub, "reader")
    promise = r.answer(r.join(0), Promise)
    r.call(Filling(0), Ok)
    failure = r.call(Relocate(0, (LeaseFailure(promise.sources[0].lease, "corrupt"),)), Failure)
    assert failure.code == "corrupt_transfer"
    assert "trainer: corrupt" in failure.message


def test_the_error_says_what_exactly_failed_at_each_source() -> None:
    hub = Hub()
    for replica in ("one", "two"):
        publish(trainer(hub, replica), 1)
    (r,) = trainer(hub, "reader")
    lease = r.answer(r.join(0), Promise).sources[0].lease
    again = r.call(Relocate(0, (LeaseFailure(lease, "unreachable", "it serves by pigeon"),)), Promise)
    failure = r.call(Relocate(0, (LeaseFailure(again.sources[0].lease, "lost"),)), Failure)
    first, second = failure.message.split("(tried: ")[1].split("; ")[:2]
    assert first.endswith(": unreachable (it serves by pigeon)")
    assert second.endswith(": lost")


def test_one_shards_failure_breaks_the_round_for_all() -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", shards=2)
    promises = [p.answer(p.join(0), Promise) for p in r]
    waiting = fill(r[0], 0, promises[0], b"sums 1 0")
    r[1].call(LeaveRound(0, "layout_mismatch", "another shape"), Ok)
    failure = r[0].answer(waiting, Failure)
    assert failure.code == "layout_mismatch"
    assert "shard 1" in failure.message
    assert hub.state.leases == {}
    again = [p.join(1) for p in r]
    assert r[0].answer(again[0], Promise).number == 1


def test_a_shard_that_reads_is_told_that_its_round_is_over() -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", shards=2)
    for p in r:
        p.answer(p.join(0), Promise)
    r[0].call(Filling(0), Ok)
    hub.later(hub.config.dead_after_s + 1, silent=(r[1],))
    (aborted,) = r[0].pushed(RoundAborted)
    assert aborted.round == 0
    restarted = hub.hello("reader", 1, 2)
    restarted.register(A + b"1")
    assert r[0].answer(r[0].join(1), Promise).number == 1
    assert restarted.answer(restarted.join(1), Promise).number == 1


def test_a_verdict_is_kept_for_the_shard_that_asks_later() -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", shards=2)
    r[0].answer(r[0].join(0), Promise)
    r[0].call(LeaveRound(0, "deadline_exceeded", "too slow"), Ok)
    assert r[1].answer(r[1].join(0), Failure).code == "deadline_exceeded"
    number = r[0].join(1)
    r[0].answer(number, Promise)
    r[1].answer(r[1].join(1), Promise)


def test_nothing_newer_is_one_verdict_for_all_shards() -> None:
    hub = Hub()
    t = trainer(hub, shards=2)
    publish(t, 1)
    r = trainer(hub, "reader", shards=2)
    for p, promise, k in zip(r, [p.answer(p.join(0), Promise) for p in r], (0, 1), strict=True):
        fill(p, 0, promise, b"sums 1 %d" % k)
    assert r[0].answer(r[0].join(1, mode="update", have=(1, 1)), NothingNewer).number == 1
    for p in t:
        p.answer(p.unpublish(), Ok)
    publish(t, 2)
    assert r[1].answer(r[1].join(1, mode="update", have=(1, 1)), NothingNewer).number == 1
    assert r[1].answer(r[1].join(2, mode="update", have=(1, 1)), Promise).number == 2


@pytest.mark.parametrize("wants", [(1, 2), (None, 2), (1, None)])
def test_shards_that_ask_for_different_versions_are_told(wants: tuple[int | None, int | None]) -> None:
    hub = Hub()
    r = trainer(hub, "reader", shards=2)
    first = r[0].join(0, wants[0])
    assert r[1].answer(r[1].join(0, wants[1]), Failure).code == "state_error"
    assert r[0].answer(first, Failure).code == "state_error"


def test_a_filling_copy_serves_its_verified_prefix_and_no_more() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (a,) = trainer(hub, "a")
    a.answer(a.join(0), Promise)
    a.call(Filling(0), Ok)
    a.call(Announce(0, 2), Ok)
    (b,) = trainer(hub, "b")
    source = b.answer(b.join(0), Promise).sources[0]
    assert (source.replica, source.whole, source.prefix) == ("a", False, 2)
    a.call(Announce(0, 3), Ok)
    assert b.pushed(SourceProgress) == [SourceProgress(source.lease, 3, False)]
    a.call(Done(0, a.put(b"sums 1 0")), Committed)
    assert b.pushed(SourceProgress)[-1] == SourceProgress(source.lease, 4, True)


def test_a_copy_that_is_processed_in_place_is_never_offered() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (a,) = trainer(hub, "a")
    a.answer(a.join(0, offer=False), Promise)
    a.call(Filling(0), Ok)
    a.call(Announce(0, 4), Ok)
    (b,) = trainer(hub, "b")
    assert b.answer(b.join(0), Promise).sources[0].replica == "trainer"
    b.call(LeaveRound(0, "deadline_exceeded", ""), Ok)
    assert not a.call(Done(0, a.put(b"sums 1 0")), Committed).published
    t.answer(t.unpublish(), Ok)
    assert b.answer(b.join(1), Failure).code == "version_unavailable"
    a.register(b"processed", portable=False)
    a.publish(1, b"processed sums", Published, held_epoch=1)
    assert b.answer(b.join(2), Failure).code == "version_unavailable"
    (c,) = trainer(hub, "c")
    c.register(b"processed", portable=False)
    assert c.answer(c.join(0), Promise).sources[0].replica == "a"


def test_a_follower_of_a_dead_reader_goes_on_from_the_draining_publisher() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (a,), (b,) = trainer(hub, "a"), trainer(hub, "b")
    a.answer(a.join(0), Promise)
    a.call(Filling(0), Ok)
    a.call(Announce(0, 2), Ok)
    lease = b.answer(b.join(0), Promise).sources[0].lease
    b.call(Filling(0), Ok)
    asked = t.unpublish()
    hub.later(hub.config.lease_s + 0.5, silent=(a,))
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [lease]
    assert asked not in t.answers, "the publisher may not go while an orphan depends on it"
    again = b.call(Relocate(0, (LeaseFailure(lease, "lost"),)), Promise)
    assert again.sources[0].replica == "trainer"
    b.call(Done(0, b.put(b"sums 1 0")), Committed)
    t.answer(asked, Ok)


def test_readers_never_follow_each_other_in_a_circle() -> None:
    hub = Hub()
    (t,) = trainer(hub)
    publish([t], 1)
    (a,), (b,) = trainer(hub, "a"), trainer(hub, "b")
    a.answer(a.join(0), Promise)
    a.call(Filling(0), Ok)
    b_source = b.answer(b.join(0), Promise).sources[0]
    assert b_source.replica == "a"
    b.call(Filling(0), Ok)
    t_lease = next(iter(hub.state.workers[hub.state.sessions[a.session]].leases))
    failure = a.call(Relocate(0, (LeaseFailure(t_lease, "lost"),)), Failure)
    assert failure.code == "version_unavailable"


def test_readers_of_another_layout_lease_every_shard_of_one_replica() -> None:
    hub = Hub()
    publish(trainer(hub, shards=2), 1)
    (r,) = trainer(hub, "reader", layout=B)
    sources = r.answer(r.join(0), Promise).sources
    assert [(s.replica, s.shard, s.num_shards) for s in sources] == [("trainer", 0, 2), ("trainer", 1, 2)]
    r.call(Filling(0), Ok)
    r.call(Announce(0, 3), Ok)
    (same,) = trainer(hub, "same", layout=B)
    assert len(same.answer(same.join(0), Promise).sources) == 2, "no prefix without the layout's own sums"
    r.call(Done(0, r.put(b"derived sums")), Committed)
    (late,) = trainer(hub, "late", layout=B)
    assert late.answer(late.join(0), Promise).sources[0].replica == "reader"


def test_wait_is_answered_when_something_newer_is_whole() -> None:
    hub = Hub()
    t = trainer(hub, shards=2)
    watcher = hub.hello("watcher", observer=True)
    first = watcher.wait()
    t[0].publish(3, b"0", Published)
    assert first not in watcher.answers
    t[1].publish(3, b"1", Published)
    assert watcher.answer(first, Available).number == 3
    second = watcher.wait((1, 3))
    assert second not in watcher.answers


def test_a_promised_round_that_a_shard_never_joins_ends() -> None:
    hub = Hub()
    publish(t := trainer(hub, shards=2), 1)
    r = trainer(hub, "reader", shards=2)
    r[0].answer(r[0].join(0), Promise)
    asked = t[1].unpublish()
    hub.later(hub.config.join_timeout_s + 1)
    assert r[0].pushed(RoundAborted)[0].code == "deadline_exceeded"
    t[1].answer(asked, Ok)
