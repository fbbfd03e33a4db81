"""The newest versions stay reachable whatever the clients call (law L11)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.messages import (
    Failure,
    JoinRound,
    LeaveRound,
    NothingNewer,
    Offload,
    Offloaded,
    Promise,
)
from tests.sim.hub import Hub
from tests.unit.state.fleet import (
    answered,
    begin,
    commit,
    dropped,
    join,
    lawful,
    offload,
    offloads_asked,
    promised,
    publish,
    replica,
    replicate,
    rows,
    source_of,
    unpublish,
)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_lone_publisher_withdraws_when_its_offload_copy_is_made(shards: int) -> None:
    hub = Hub(retain=1)
    t = replica(hub, "trainer", shards)
    publish(t, 1)
    asked = unpublish(t)
    assert offloads_asked(*t) == [1] * shards
    assert answered(t, asked) == [False] * shards
    for k in range(shards):
        offload(t[k])
        assert answered(t, asked) == [True] * (k + 1) + [False] * (shards - k - 1)
        lawful(hub)
    reader = replica(hub, "late", shards)
    assert replicate(reader) == 1
    assert rows(reader[0])[1] == (True, True, ["late"]), "the offload copy goes when another replica has it"
    assert len(dropped(*t)) == shards
    lawful(hub)


def test_readers_read_from_the_offload_copy_and_hold_it() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 1)
    unpublish([t])
    kept = offload(t)
    (late,) = replica(hub, "late")
    promise = late.answer(late.join(0), Promise)
    (source,) = promise.sources
    assert (source.replica, source.whole) == ("trainer", True)
    assert source.placement == t.put(b"offload 1 of " + t.session)
    publish([t], 2)
    assert dropped(t) == [], "somebody still reads it"
    assert not rows(t)[1][1]
    (later,) = replica(hub, "later")
    later.refused(JoinRound(0, 1), "version_unavailable")
    begin([late], 0)
    commit([late], 0, 1)
    assert dropped(t) == [kept]
    lawful(hub)


def test_a_lone_publisher_keeps_as_many_as_are_retained_and_no_more() -> None:
    hub = Hub(retain=2)
    (t,) = replica(hub, "trainer")
    kept = []
    for number in range(1, 5):
        publish([t], number)
        assert dropped(t) == kept[: max(0, number - 2)]
        (asked,) = unpublish([t])
        kept.append(offload(t))
        assert answered([t], [asked]) == [True]
        lawful(hub)
    assert {number: row[1] for number, row in rows(t).items()} == {3: True, 4: True}
    (reader,) = replica(hub, "late")
    assert source_of(reader, reader.join(0, 3)) == "trainer"
    other = replica(hub, "other")[0]
    other.refused(JoinRound(0, 2), "version_unavailable")


@pytest.mark.parametrize("retain", [1, 2])
def test_who_replaces_the_last_copy_in_place_offloads_it_first(retain: int) -> None:
    """Retain N, the last holder of version 7 updates to 8: 7 can be fetched until enough newer ones are safe."""
    hub = Hub(retain=retain)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "rollout")
    publish([t], 7)
    replicate([r])
    assert answered([t], unpublish([t])) == [True], "the rollout has it"
    assert offloads_asked(t) == []
    publish([t], 8)
    assert promised([r], join([r], 1, mode="update")) == 8
    asked = unpublish([r])
    assert offloads_asked(r) == [7]
    kept = offload(r)
    assert answered([r], asked) == [True]
    begin([r], 1)
    (late,) = replica(hub, "late")
    assert source_of(late, late.join(0, 7)) == "rollout"
    late.ask(LeaveRound(0, "deadline_exceeded", "no time"))
    assert dropped(r) == []
    commit([r], 1, 8)
    assert (dropped(r) == [kept]) == (retain == 1), "with two, 7 is needed until 9 is safe as well"
    lawful(hub)
    if retain == 2:
        unpublish([t])
        publish([t], 9)
        assert dropped(r) == [], "only the publisher has 9"
        assert promised([late], join([late], 1, 9)) == 9
        begin([late], 1)
        commit([late], 1, 9)
        assert dropped(r) == [kept]


def test_the_last_of_many_rollouts_keeps_what_all_replace() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 7)
    fleet = [replica(hub, f"rollout-{k}", 2 if k == 9 else 1) for k in range(4)]
    for r in fleet:
        replicate(r)
    unpublish([t])
    publish([t], 8)
    for r in fleet[:3]:
        promised(r, join(r, 1, mode="update"))
        assert answered(r, unpublish(r)) == [True]
    assert offloads_asked(*(p for r in fleet for p in r)) == []
    last = fleet[3]
    promised(last, join(last, 1, mode="update"))
    asked = unpublish(last)
    assert offloads_asked(*last) == [7]
    hub.later(20, silent=(t,))  # the trainer is gone before any rollout has 8
    (late,) = replica(hub, "late")
    waiting = late.join(0, 7)
    assert waiting not in late.answers, "it will be offered again in a moment"
    offload(last[0])
    assert source_of(late, waiting) == "rollout-3"
    assert answered(last, asked) == [True]
    assert not any("lost its last reliable holder" in line for line in hub.logs if "version 7" in line)
    lawful(hub)


def test_no_copy_is_made_where_another_rollout_is_first_to_be_whole() -> None:
    hub = Hub(retain=1)
    (t,), (a,), (b,) = (replica(hub, name) for name in ("trainer", "a", "b"))
    publish([t], 7)
    replicate([a])
    replicate([b])
    unpublish([t])
    publish([t], 8)
    promised([a], join([a], 1, mode="update"))
    assert answered([a], unpublish([a])) == [True]
    begin([a], 1)
    promised([b], join([b], 1, mode="update"))
    asked = unpublish([b])
    (push,) = b.pushed(Offload)
    assert answered([b], asked) == [False]
    commit([a], 1, 8)
    assert answered([b], asked) == [True], "8 is safe at a: 7 is not retained any more"
    assert dropped(b) == [push.copy], "it is told to stop"
    late = b.call(Offloaded(push.copy, b.put(b"too late")), Failure)
    assert "free it" in late.message
    lawful(hub)


def test_a_publisher_waits_for_who_reads_its_copy_instead_of_making_another() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "rollout")
    publish([t], 1)
    promised([r], join([r], 0))
    begin([r], 0)
    asked = unpublish([t])
    assert offloads_asked(t) == []
    commit([r], 0, 1)
    assert answered([t], asked) == [True]
    assert offloads_asked(t) == []
    lawful(hub)


@pytest.mark.parametrize("how", ["breaks", "silent", "not offered", "spot", "spot and breaks"])
def test_it_makes_one_as_soon_as_no_reader_will_keep_the_version(how: str) -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "rollout", spot="spot" in how)
    publish([t], 1)
    promised([r], join([r], 0, offer=how != "not offered"))
    begin([r], 0)
    asked = unpublish([t])
    assert (offloads_asked(t) == [1]) == (how in ("not offered", "spot", "spot and breaks"))
    if "breaks" in how:
        r.ask(LeaveRound(0, "deadline_exceeded", "no time"))
    elif how == "silent":
        hub.later(6, silent=(r,))
    assert offloads_asked(t) == [1]
    offload(t)
    readers_left = how in ("breaks", "silent", "spot and breaks")
    assert answered([t], asked) == [readers_left], "its readers go on"
    lawful(hub)


def test_copies_that_are_withdrawn_or_only_staged_or_spot_protect_from_nothing() -> None:
    hub = Hub(retain=1)
    (t,), (a,), (b,), (g,) = (replica(hub, name) for name in ("trainer", "a", "b", "staging"))
    (s,), (slow,) = (replica(hub, name, spot=True) for name in ("spot", "slow"))
    publish([t], 1)
    for reader in (a, b, s):
        replicate([reader])
    promised([g], join([g], 0, mode="stage"))
    begin([g], 0)
    commit([g], 0, 1)
    promised([slow], join([slow], 0))
    for peer in (t, b):
        unpublish([peer])
        assert offloads_asked(peer) == [], "a has it"
    assert len(hub.state.draining) > 0, "the slow reader reads one of them"
    asked = unpublish([a])
    assert offloads_asked(a) == [1]
    assert offloads_asked(t, b) == [], "one that has to keep it is enough"
    offload(a)
    begin([slow], 0)
    commit([slow], 0, 1)
    assert answered([a], asked) == [True]
    lawful(hub)


def test_the_last_spot_holder_offloads_and_others_need_not() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    spots = [replica(hub, f"spot-{k}", spot=True) for k in range(3)]
    publish([t], 1)
    for spot in spots:
        replicate(spot)
    hub.later(20, silent=(t,))
    assert any("version 1" in line and "lost its last reliable holder, 'trainer'" in line for line in hub.logs)
    (n,) = replica(hub, "new-trainer")
    publish([n], 2)
    for spot in spots[:2]:
        assert answered(spot, unpublish(spot)) == [True]
        assert offloads_asked(*spot) == []
    (last,) = spots[2]
    promised([last], join([last], 1, mode="update"))
    asked = unpublish([last])
    assert offloads_asked(last) == [1]
    kept = offload(last)
    assert answered([last], asked) == [True]
    assert rows(n)[1] == (True, True, ["spot-2"])
    begin([last], 1)
    commit([last], 1, 2)
    assert dropped(last) == [kept], "the new version is whole wherever the old one is"
    lawful(hub)


def test_a_reliable_reader_of_what_only_spot_workers_hold_frees_them() -> None:
    hub = Hub(retain=1)
    (t,), (s,), (r,) = replica(hub, "trainer"), replica(hub, "spot", spot=True), replica(hub, "r")
    publish([t], 1)
    replicate([s])
    hub.later(20, silent=(t,))
    promised([r], join([r], 0))
    begin([r], 0)
    asked = unpublish([s])
    assert offloads_asked(s) == [], "a reliable reader will hold it soon"
    commit([r], 0, 1)
    assert answered([s], asked) == [True]
    lawful(hub)


def test_the_verdict_is_one_for_the_replica() -> None:
    """The other replica has lost shard 1, and this one shard 0: neither has all of it, so that neither could let go."""
    hub = Hub(retain=1)
    a, b = replica(hub, "a", 2), replica(hub, "b", 2)
    publish(a, 1)
    replicate(b)
    assert answered(b[1:], unpublish(b[1:])) == [True], "a has all of it"
    asked = unpublish(a[:1])
    assert offloads_asked(a[0]) == [1], "shard 0 alone of b does not do"
    assert offloads_asked(a[1]) == [], "shard 1 is still published"
    offload(a[0])
    assert answered(a[:1], asked) == [True]
    (late,) = [replica(hub, "late", 2)]
    requests = join(late, 0)
    assert {source_of(p, n) for p, n in zip(late, requests, strict=True)} == {"a"}
    unpublish(a[1:])
    lawful(hub)


def test_who_let_go_relying_on_a_replica_that_dies_keeps_what_it_still_has() -> None:
    hub = Hub(retain=1)
    (t,), (r,), (slow,) = replica(hub, "trainer"), replica(hub, "r"), replica(hub, "slow", spot=True)
    publish([t], 1)
    promised([slow], join([slow], 0))
    begin([slow], 0)
    replicate([r])
    asked = unpublish([t])
    assert answered([t], asked) == [False], "it is read"
    assert offloads_asked(t) == []
    hub.later(20, silent=(r,))
    assert offloads_asked(t) == [1]
    offload(t)
    commit([slow], 0, 1)
    assert answered([t], asked) == [True]
    assert rows(t)[1] == (True, True, ["slow", "trainer"])
    lawful(hub)


def test_nothing_is_retained_that_never_was_whole() -> None:
    hub = Hub(retain=1)
    t = replica(hub, "trainer", 2)
    publish(t[:1], 1)
    assert answered(t[:1], unpublish(t[:1])) == [True]
    assert offloads_asked(*t) == []


def test_latest_is_the_newest_version_whatever_is_retained() -> None:
    hub = Hub(retain=2)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r")
    publish([t], 1)
    unpublish([t])
    offload(t)
    publish([t], 2)
    assert replicate([r]) == 2
    hub.later(20, silent=(t, r))
    (late,) = replica(hub, "late")
    late.refused(JoinRound(0, None), "version_unavailable")


def test_an_offload_copy_of_the_version_does_not_pass_for_what_is_registered() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r", spot=True)
    publish([t], 1)
    replicate([r])
    unpublish([t])
    offload(t)
    n = t.join(0, mode="update")
    assert not isinstance(t.answers.get(n), NothingNewer)
    assert source_of(t, n) == "r"
    begin([t], 0)
    commit([t], 0, 1)
    assert len(dropped(t)) == 1, "it is in registered memory again"
    lawful(hub)
