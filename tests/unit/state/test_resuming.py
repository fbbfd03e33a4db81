"""Shards that lose their connection, or the server, in the middle of a round come back to that round (laws L2, L6)."""

from __future__ import annotations

import pytest

from tensorhub_core.ids import SessionId
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    PROTOCOL,
    Committed,
    Done,
    Ended,
    Failure,
    Filling,
    Held,
    Hello,
    LeaveRound,
    NothingNewer,
    Ok,
    Promise,
    Register,
    RegisterStaging,
    Relocate,
    RoundAborted,
    UnknownSession,
    Welcome,
)
from tests.sim.hub import Hub, Peer, digest
from tests.unit.state.test_rounds import A, fill, publish

KEY = (1, 1)


def back(hub: Hub, replica: str, k: int, shards: int = 2, *, number: int | None = None, **more: object) -> Peer:
    """Let a worker say hello over a new connection, with the same token, as one of version `number` if it holds one."""
    peer = hub.peer(f"{replica}/{k}")
    peer.shard = k
    layout, placement, sums = A + b"%d" % k, b"placement of %s %d" % (replica.encode(), k), b"sums %s %d"
    sums = b"sums %d %d" % (number or 0, k)
    held = None if number is None else Held(1, number, digest(layout), digest(placement), digest(sums), 400, 4)
    more = {"high": KEY, "token": f"{replica} {k}", **more}
    hello = Hello(PROTOCOL, str(more.pop("token")), "policy", replica, k, shards, held=held, **more)  # type: ignore[arg-type]
    peer.answers[0] = peer.call(hello, Welcome)
    for blob in (layout, placement, sums):
        peer.put(blob)
    peer.call(Register(digest(layout), digest(placement), 400, 4), Ok)
    return peer


def told(peer: Peer) -> int:
    """Return the round that a worker's welcome named."""
    return peer.answer(0, Welcome).next_round


def lives(number: int = 0) -> tuple[Hub, list[Peer], list[Peer]]:
    """A trainer with version 1 and a reader of two shards, all with tokens that `back` uses."""
    hub = Hub()
    t = [back(hub, "trainer", k, high=None) for k in (0, 1)]
    publish(t, 1)
    r = [back(hub, "reader", k, high=None) for k in (0, 1)]
    for _ in range(number):
        r[0].join(told(r[0]))
    return hub, t, r


def restarted() -> tuple[Hub, list[Peer]]:
    """A server that has just started, to which the trainer has come back first."""
    hub = Hub(server_epoch=2)
    return hub, [back(hub, "trainer", k, number=1) for k in (0, 1)]


def grace(hub: Hub) -> None:
    hub.later(hub.config.grace_s + 0.5)


# --- the server goes on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting for the promise", "reading", "looking for a source", "done"])
def test_a_shard_that_lost_its_connection_goes_on_in_its_round_and_the_others_notice_nothing(when: str) -> None:
    hub, t, r = lives()
    if when == "waiting for the promise":
        asked = [p.join(0, 2) for p in r]
        again = back(hub, "reader", 0)
        assert again.join(0, 2, again=True) not in again.answers
        for p in t:
            p.unpublish()
        publish(t, 2)
        assert again.answer(again.next_request - 1, Promise).number == 2
        assert r[1].answer(asked[1], Promise).number == 2
        return
    promises = [p.answer(p.join(0), Promise) for p in r]
    for p in r:
        p.call(Filling(0), Ok)
    if when == "looking for a source":
        hub.later(hub.config.lease_s + 1, silent=tuple(t))
        r[0].ask(Relocate(0, ()))
    elif when == "done":
        r[0].ask(Done(0, r[0].put(b"sums 1 0")))
    again = back(hub, "reader", 0)
    assert told(again) == 1
    asked0 = again.join(0, again=True, promised=KEY)
    if when == "looking for a source":
        hub.later(1.0)
    promise = again.answer(asked0, Promise)
    if when in ("reading", "done"):
        assert promise.sources == promises[0].sources, "its leases stand"
    again.call(Filling(0), Ok)
    assert r[1].pushed(RoundAborted) == []
    done = [again.ask(Done(0, again.put(b"sums 1 0"))), r[1].ask(Done(0, r[1].put(b"sums 1 1")))]
    assert again.answer(done[0], Committed).published
    assert r[1].answer(done[1], Committed).published
    assert check(hub.state) == []


def test_a_commit_whose_answer_was_lost_is_told_again_and_the_numbers_stay_together() -> None:
    hub, t, r = lives()
    promises = [p.answer(p.join(0), Promise) for p in r]
    for k, p in enumerate(r):
        fill(p, 0, promises[k], b"sums 1 %d" % k)
    again = back(hub, "reader", 1)
    end = again.answer(again.join(0, mode="update", again=True, promised=KEY), NothingNewer)
    assert (end.epoch, end.number) == KEY
    for p in t:
        p.answer(p.unpublish(), Ok)
    publish(t, 2)
    asked = [p.join(1, mode="update", have=KEY) for p in (r[0], again)]
    assert {p.answer(n, Promise).number for p, n in zip((r[0], again), asked, strict=True)} == {2}


def test_a_round_that_was_broken_while_a_shard_was_away_ends_for_it_as_for_the_others() -> None:
    hub, _, r = lives()
    for p in r:
        p.answer(p.join(0), Promise)
    r[0].call(LeaveRound(0, "corrupt_transfer", "wrong bytes"), Ok)
    again = back(hub, "reader", 1)
    failure = again.answer(again.join(0, again=True, promised=KEY), Failure)
    assert failure.code == "corrupt_transfer"
    asked = [p.join(1) for p in (r[0], again)]
    assert {p.answer(n, Promise).number for p, n in zip((r[0], again), asked, strict=True)} == {1}


def test_a_shard_that_left_and_whose_word_was_lost_breaks_the_round_when_it_comes_back() -> None:
    hub, _, r = lives()
    promises = [p.answer(p.join(0), Promise) for p in r]
    done = fill(r[1], 0, promises[1], b"sums 1 1")
    again = back(hub, "reader", 0, ended=Ended(0))
    assert r[1].answer(done, Failure).code == "state_error"
    assert told(again) == 1


def test_only_what_was_joined_before_is_joined_again() -> None:
    hub, _, r = lives()
    for p in r:
        p.answer(p.join(0), Promise)
    for k in range(40):
        number = k
        r[0].call(LeaveRound(number, "state_error", "next"), Ok)
        for p in r:
            p.join(number + 1)
    again = back(hub, "reader", 0)
    assert "cannot be joined" in again.answer(again.join(3, again=True), Failure).message, "long forgotten"
    assert len(hub.state.models["policy"].groups["reader"].ended) <= hub.config.kept_rounds  # type: ignore[index]


# --- the server was restarted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mode", ["replicate", "stage"])
def test_a_finished_shard_speaks_for_the_one_that_has_not_heard_it(first: int, mode: str) -> None:
    """Shard 0 heard that round 7 was committed, shard 1 did not; the server forgot it. Both get version 1."""
    hub, t = restarted()
    publish_newer = [t[k].unpublish() for k in (0, 1)]
    r: dict[int, Peer] = {}
    for k in (first, 1 - first):
        number, ended = (1, Ended(7, KEY)) if k == 0 else (None, Ended(6))
        r[k] = back(hub, "reader", k, number=None if mode == "stage" else number, ended=ended)
        if mode == "stage":
            r[k].call(RegisterStaging(r[k].put(b"staging %d" % k)), Ok)
    asked = r[1].join(7, mode=mode, again=True, promised=KEY)
    grace(hub)
    assert publish_newer[1] not in t[1].answers, "its source is held for it"
    promise = r[1].answer(asked, Promise)
    assert (promise.number, promise.round) == (1, 7)
    r[1].call(Filling(7), Ok)
    assert r[1].call(Done(7, r[1].put(b"sums 1 1")), Committed).published, "nobody else has to be done"
    assert check(hub.state) == []
    for p, n in zip(t, publish_newer, strict=True):
        p.answer(n, Ok)
    publish(t, 2)
    for k in (0, 1):
        r[k].call(RegisterStaging(r[k].put(b"staging %d" % k)), Ok)
    have = None if mode == "stage" else KEY
    asks = [r[k].join(8, mode="stage" if mode == "stage" else "update", have=have) for k in (0, 1)]
    if mode == "stage":
        return  # what is staged is installed first
    assert {r[k].answer(asks[k], Promise).number for k in (0, 1)} == {2}, "their calls meet again"


def test_a_finished_install_speaks_for_the_one_that_has_not_heard_it() -> None:
    hub, _ = restarted()
    done = back(hub, "reader", 0, number=1, ended=Ended(3, KEY))
    late = back(hub, "reader", 1, ended=Ended(2, KEY))
    late.call(RegisterStaging(late.put(b"staging")), Ok)
    asked = late.join(3, mode="install", have=KEY, again=True, promised=KEY)
    grace(hub)
    assert late.answer(asked, Promise).number == 1
    late.call(Filling(3), Ok)
    assert check(hub.state) == []
    assert late.call(Done(3, late.put(b"sums 1 1")), Committed).published
    assert told(done) == 4


@pytest.mark.parametrize("ended", [Ended(7), Ended(7, (1, 2)), Ended(9, KEY)])
@pytest.mark.parametrize("mode", ["replicate", "install"])
def test_a_round_that_the_others_ended_otherwise_is_broken_for_who_comes_back(ended: Ended, mode: str) -> None:
    hub, _ = restarted()
    back(hub, "reader", 0, ended=ended)
    late = back(hub, "reader", 1, ended=Ended(6))
    late.call(RegisterStaging(late.put(b"staging")), Ok)
    asked = late.join(7, mode=mode, have=KEY if mode == "install" else None, again=True, promised=KEY)
    grace(hub)
    assert late.answer(asked, Failure).code == "state_error"
    assert hub.state.leases == {}


def test_what_the_others_heard_of_nothing_newer_is_heard_again() -> None:
    hub, _ = restarted()
    back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
    late = back(hub, "reader", 1, number=1, ended=Ended(6, KEY))
    asked = late.join(7, mode="update", have=KEY, again=True)
    grace(hub)
    assert late.answer(asked, NothingNewer).number == 1


def test_shards_that_all_come_back_in_the_middle_get_what_they_were_promised() -> None:
    hub, t = restarted()
    r = [back(hub, "reader", k, ended=Ended(4)) for k in (0, 1)]
    asked = [p.join(5, again=True, promised=KEY) for p in r]
    for p in t:
        p.unpublish()
    grace(hub)
    promises = [p.answer(n, Promise) for p, n in zip(r, asked, strict=True)]
    for k, p in enumerate(r):
        fill(p, 5, promises[k], b"sums 1 %d" % k)
    assert check(hub.state) == []
    assert back(hub, "late", 0).session != SessionId(b"")


def test_a_shard_that_was_restarted_with_the_server_joins_the_round_that_another_comes_back_to() -> None:
    hub, _ = restarted()
    fresh = back(hub, "reader", 0, high=None, token="another life")
    assert told(fresh) == 0
    late = back(hub, "reader", 1, ended=Ended(6))
    assert fresh.pushed(UnknownSession) == [UnknownSession(2)], "numbers go on where they were: it says hello again"
    fresh = back(hub, "reader", 0, high=None, token="another life")
    asked = late.join(7, again=True, promised=KEY), fresh.join(told(fresh))
    grace(hub)
    assert late.answer(asked[0], Promise).number == fresh.answer(asked[1], Promise).number == 1
    assert check(hub.state) == []


def test_idle_shards_that_come_back_meet_in_the_next_round() -> None:
    """The one that had not called round 42 hears in it what the other one heard: nothing newer."""
    hub, t = restarted()
    r = [back(hub, "reader", k, number=1, ended=Ended(41 + k, KEY)) for k in (0, 1)]
    r[0] = back(hub, "reader", 0, number=1, ended=Ended(41, KEY))
    assert [told(p) for p in r] == [42, 43]
    grace(hub)
    assert r[0].answer(r[0].join(42, mode="update", have=KEY), NothingNewer).number == 1
    for p in t:
        p.answer(p.unpublish(), Ok)
    publish(t, 2)
    asked = [p.join(43, mode="update", have=KEY) for p in r]
    assert {p.answer(n, Promise).number for p, n in zip(r, asked, strict=True)} == {2}
