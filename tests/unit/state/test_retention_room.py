"""What cannot be kept for lack of room, and messages that come twice or too late (law L11)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Failure,
    LeaveRound,
    Offload,
    Offloaded,
    OffloadFailed,
    OffloadKept,
    Ok,
    Publish,
    Published,
    Unpublish,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.fleet import (
    SIZE,
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
    sums,
    unpublish,
)


def publish_with_room(peer: Peer, number: int, room_bytes: int, held_epoch: int | None = None) -> None:
    """Publish, and say how much can still be offloaded."""
    peer.call(Publish(number, peer.put(sums(number, 0)), held_epoch, room_bytes), Published)


def test_what_cannot_be_offloaded_is_not_withdrawn_and_goes_on_being_offered() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer"), replica(hub, "r")
    publish([t], 1)
    (asked,) = unpublish([t])
    (push,) = t.pushed(Offload)
    t.call(OffloadFailed(push.copy, "config_error", "offload_limit_bytes allows 5 bytes"), Ok)
    refusal = t.answer(asked, Failure)
    assert (refusal.code, refusal.message) == ("config_error", "offload_limit_bytes allows 5 bytes")
    assert source_of(r, r.join(0)) == "trainer"
    r.ask(LeaveRound(0, "deadline_exceeded", "no time"))
    (again,) = unpublish([t])
    assert offloads_asked(t) == [1, 1], "a later call tries again"
    offload(t)
    assert answered([t], [again]) == [True]
    lawful(hub)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("ends", ["commit", "leave"])
def test_who_cannot_offload_waits_for_who_is_about_to_hold_it_or_a_newer_one(newer: bool, ends: str) -> None:
    hub = Hub(retain=1)
    (t,), (r,), (other,) = replica(hub, "trainer"), replica(hub, "r"), replica(hub, "other")
    publish([t], 1)
    replicate([r])
    unpublish([t])
    if newer:
        publish([t], 2)
    (spot,) = replica(hub, "spot", spot=True)
    if not newer:
        promised([other], join([other], 0, 1))
        begin([other], 0)
    (asked,) = unpublish([r])
    if not newer:
        assert offloads_asked(r) == [], "it waits for the reader anyway"
    else:
        (push,) = r.pushed(Offload)
        promised([other], join([other], 0))
        begin([other], 0)
        r.call(OffloadFailed(push.copy, "config_error", "no room"), Ok)
    assert answered([r], [asked]) == [False]
    if ends == "commit":
        commit([other], 0, 2 if newer else 1)
        assert answered([r], [asked]) == [True]
    else:
        other.ask(LeaveRound(0, "deadline_exceeded", "no time"))
        if newer:
            assert r.answer(asked, Failure).message == "no room"
        else:
            assert offloads_asked(r) == [1]
    assert spot.pushes == []
    lawful(hub)


def test_a_spot_worker_is_never_held_back() -> None:
    hub = Hub(retain=1)
    (t,), (s,) = replica(hub, "trainer"), replica(hub, "spot", spot=True)
    publish([t], 1)
    replicate([s])
    hub.later(20, silent=(t,))
    (asked,) = unpublish([s])
    (push,) = s.pushed(Offload)
    s.call(OffloadFailed(push.copy, "config_error", "no room"), Ok)
    assert answered([s], [asked]) == [True]
    assert any("lost its last holder, 'spot'" in line and "no room" in line for line in hub.logs)
    lawful(hub)


def test_a_publish_that_could_not_be_kept_later_is_refused() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    refusal = t.refused(Publish(1, t.put(sums(1, 0)), None, SIZE - 1), "config_error")
    for word in ("offload_limit_bytes", str(SIZE), str(SIZE - 1), "retain = 0", "tensorhub seed --keep"):
        assert word in refusal.message
    assert rows(t) == {}
    publish([t], 1)


def test_room_that_the_version_frees_itself_counts() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    for number, room in ((1, SIZE), (2, 0), (3, 0)):
        publish_with_room(t, number, room)
        (asked,) = unpublish([t])
        offload(t)
        assert answered([t], [asked]) == [True]
    assert len(dropped(t)) == 2
    two = Hub(retain=2)
    (t,) = replica(two, "trainer")
    publish_with_room(t, 1, SIZE)
    unpublish([t])
    offload(t)
    t.refused(Publish(2, t.put(sums(2, 0)), None, 0), "config_error")


def test_an_offload_copy_is_made_when_the_one_it_takes_the_place_of_is_gone() -> None:
    hub = Hub(retain=1)
    (t,), (s,) = replica(hub, "trainer"), replica(hub, "spot", spot=True)
    publish_with_room(t, 1, SIZE)
    unpublish([t])
    offload(t)
    promised([s], join([s], 0))
    begin([s], 0)
    publish_with_room(t, 2, 0)
    asked = unpublish([t])
    assert offloads_asked(t) == [1], "the memory of the other is still read"
    commit([s], 0, 1)
    assert len(dropped(t)) == 1
    assert offloads_asked(t) == [1, 2]
    offload(t)
    assert answered([t], asked) == [True]
    lawful(hub)


def test_a_keeper_does_for_room_as_long_as_it_is_reliable() -> None:
    hub = Hub(retain=1)
    (t,), (k,) = replica(hub, "trainer"), replica(hub, "keeper", keeper=True)
    publish_with_room(t, 1, 0)
    promised([k], join([k], 0))
    begin([k], 0)
    asked = unpublish([t])
    commit([k], 0, 1)
    assert answered([t], asked) == [True]
    assert offloads_asked(t) == []
    hub.later(6, silent=(k,))
    t.refused(Publish(2, t.put(sums(2, 0)), None, 0), "config_error")
    lawful(hub)


def test_a_spot_publisher_and_a_reader_are_not_refused_for_room() -> None:
    hub = Hub(retain=1)
    (t,), (r,) = replica(hub, "trainer", spot=True), replica(hub, "r")
    publish_with_room(t, 1, 0)
    publish_with_room(r, 1, 0, held_epoch=1)


def test_asking_and_telling_twice_changes_nothing() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 1)
    (first,) = unpublish([t])
    kept = offload(t)
    (push,) = t.pushed(Offload)
    again = t.call(Offloaded(push.copy, t.put(b"offload 1 of " + t.session)), OffloadKept)
    assert again.copy == kept
    assert answered([t], [first]) == [True]
    assert answered([t], [t.ask(Unpublish())]) == [True]
    t.call(OffloadFailed(push.copy, "config_error", "late"), Ok)
    lawful(hub)


def test_a_call_that_is_sent_again_asks_again() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 1)
    (first,) = unpublish([t])
    (second,) = unpublish([t])
    assert t.answer(first, Failure).code == "state_error"
    one, two = t.pushed(Offload)
    assert one == two
    offload(t)
    assert answered([t], [second]) == [True]


def test_without_its_placement_an_offload_copy_is_not_taken() -> None:
    hub = Hub(retain=1)
    (t,) = replica(hub, "trainer")
    publish([t], 1)
    unpublish([t])
    (push,) = t.pushed(Offload)
    t.refused(Offloaded(push.copy, b"unknown"), "state_error")
    t.refused(Offloaded("c9.9", b"unknown"), "state_error")
    lawful(hub)


def test_when_a_spot_replica_gives_up_nothing_is_asked_of_its_other_shards() -> None:
    hub = Hub(retain=1)
    t, s = replica(hub, "trainer", 2), replica(hub, "spot", 2, spot=True)
    publish(t, 1)
    replicate(s)
    hub.later(20, silent=tuple(t))
    asked = unpublish(s)
    (push,) = s[0].pushed(Offload)
    s[0].call(OffloadFailed(push.copy, "config_error", "no room"), Ok)
    assert answered(s, asked) == [True, True]
    assert len(s[1].pushed(Offload)) == len(dropped(s[1])) == 1, "what was asked is taken back, and not asked again"
    lawful(hub)


def test_copies_that_say_to_lie_at_one_place_are_told_apart_by_their_versions() -> None:
    hub = Hub(retain=2)
    (t,) = replica(hub, "trainer")
    copies = []
    for number in (1, 2):
        publish([t], number)
        asked = unpublish([t])
        push = t.pushed(Offload)[-1]
        copies.append(t.call(Offloaded(push.copy, t.put(b"the same place")), OffloadKept).copy)
        assert answered([t], asked) == [True]
    assert len(set(copies)) == 2
    assert check(hub.state) == []
