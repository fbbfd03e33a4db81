"""One shard of a replica is about to leave while another one takes its copy back (law L11)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.messages import Failure, HandOver, Leave, Offload, OffloadFailed, Ok
from tests.sim.hub import Hub
from tests.unit.state.fleet import (
    answered,
    begin,
    commit,
    join,
    lawful,
    offload,
    offloads_asked,
    publish,
    replica,
    replicate,
    source_of,
    unpublish,
)
from tests.unit.state.test_retention_lives import losses


@pytest.mark.parametrize("leaves_first", [True, False])
def test_while_a_shard_hands_over_the_others_keep_their_part_of_the_version(leaves_first: bool) -> None:
    hub = Hub(retain=1)
    t, other = replica(hub, "trainer", 2), replica(hub, "other", 2)
    publish(t, 1)
    if leaves_first:
        leaving = t[0].ask(HandOver())
        (asked,) = unpublish([t[1]])
    else:
        (asked,) = unpublish([t[1]])
        leaving = t[0].ask(HandOver())
    assert answered(t, [leaving, asked]) == [False, False]
    assert (offloads_asked(t[0]), offloads_asked(t[1])) == ([], [1])
    joined = join(other, 0)
    assert answered(other, joined) == [False, False], "it is offered again as soon as the copy is made"
    offload(t[1])
    assert answered([t[1]], [asked]) == [True]
    assert [source_of(p, n) for p, n in zip(other, joined, strict=True)] == ["trainer", "trainer"]
    begin(other, 0)
    assert answered([t[0]], [leaving]) == [False]
    commit(other, 0, 1)
    assert answered([t[0]], [leaving]) == [True]
    t[0].call(Leave(), Ok)
    assert losses(hub) == []
    lawful(hub)


@pytest.mark.parametrize("ends", ["withdraws", "leaves", "dies"])
@pytest.mark.parametrize("made", [False, True])
def test_a_hand_over_that_nobody_takes_holds_the_other_shards_back_no_longer_than_itself(made: bool, ends: str) -> None:
    hub = Hub(retain=1)
    t, _ = replica(hub, "trainer", 2), replica(hub, "other", 2)
    publish(t, 1)
    t[0].ask(HandOver())
    (asked,) = unpublish([t[1]])
    if made:
        offload(t[1])
    assert answered([t[1]], [asked]) == [made]
    assert losses(hub) == []
    if ends == "withdraws":
        assert answered([t[0]], unpublish([t[0]])) == [True]
    elif ends == "leaves":
        t[0].call(Leave(), Ok)
    else:
        hub.later(20, silent=(t[0],))
    assert answered([t[1]], [asked]) == [True]
    assert len(losses(hub)) == 1
    lawful(hub)


def test_a_hand_over_with_nobody_there_holds_nobody_back() -> None:
    hub = Hub(retain=1)
    t = replica(hub, "trainer", 2)
    publish(t, 1)
    t[0].refused(HandOver(), "version_unavailable")
    assert answered([t[1]], unpublish([t[1]])) == [True]
    assert offloads_asked(*t) == []
    assert len(losses(hub)) == 1
    lawful(hub)


def test_who_has_no_room_for_its_part_while_another_hands_over_goes_on_offering_it() -> None:
    hub = Hub(retain=1)
    t, other = replica(hub, "trainer", 2), replica(hub, "other", 2)
    publish(t, 1)
    t[0].ask(HandOver())
    (asked,) = unpublish([t[1]])
    (push,) = t[1].pushed(Offload)
    t[1].call(OffloadFailed(push.copy, "config_error", "no room"), Ok)
    assert t[1].answer(asked, Failure).message == "no room"
    assert [source_of(p, n) for p, n in zip(other, join(other, 0), strict=True)] == ["trainer", "trainer"]
    lawful(hub)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_hand_over_waits_for_who_is_only_silent(comes_back: bool) -> None:
    hub = Hub(retain=1)
    (t,), (keeper,) = replica(hub, "trainer"), replica(hub, "keeper", keeper=True)
    publish([t], 1)
    hub.later(6, silent=(keeper,))
    leaving = t.ask(HandOver())
    assert answered([t], [leaving]) == [False]
    if comes_back:
        replicate([keeper])
        assert answered([t], [leaving]) == [True]
    else:
        hub.later(20, silent=(keeper,))
        assert t.answer(leaving, Failure).code == "version_unavailable"
    assert losses(hub) == []
    lawful(hub)


def test_a_spot_replica_and_one_that_leaves_take_nothing_over() -> None:
    hub = Hub(retain=1)
    (t,), (r,), _ = replica(hub, "trainer"), replica(hub, "r"), replica(hub, "spot", spot=True)
    publish([t], 1)
    r.call(HandOver(), Ok)
    t.refused(HandOver(), "version_unavailable")
    lawful(hub)
