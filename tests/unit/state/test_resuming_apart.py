"""After a restart shards of a replica come back in different rounds: their calls go on to meet (laws L2, L5, L6)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Committed,
    Done,
    Ended,
    Failure,
    Filling,
    LeaveRound,
    NothingNewer,
    Ok,
    Promise,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_resuming import KEY, back, grace, restarted, told
from tests.unit.state.test_rounds import publish


def finish(late: Peer, number: int, asked: int) -> None:
    """Let shard 1 fill version 1 in a round and hear that it is committed."""
    assert late.answer(asked, Promise).number == 1
    late.call(Filling(number), Ok)
    assert late.call(Done(number, late.put(b"sums 1 1")), Committed).published


@pytest.mark.parametrize("first", ["the earlier", "the later"])
@pytest.mark.parametrize("calls", ["runs", "is new"])
def test_a_shard_that_is_a_round_ahead_waits_until_the_other_has_what_it_has(first: str, calls: str) -> None:
    """Shard 0 heard the end of round 7, and is in round 8 or calls it now; shard 1 is still in round 7."""
    hub, t = restarted()
    if first == "the later":
        ahead = back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
        waits = ahead.join(8, mode="update", have=KEY, again=calls == "runs")
    late = back(hub, "reader", 1, ended=Ended(6))
    asked = late.join(7, again=True, promised=KEY)
    if first == "the earlier":
        ahead = back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
        assert told(ahead) == 8
        waits = ahead.join(8, mode="update", have=KEY, again=calls == "runs")
    assert waits not in ahead.answers
    assert check(hub.state) == []
    grace(hub)
    assert waits not in ahead.answers, "its round has not begun"
    assert check(hub.state) == []
    finish(late, 7, asked)
    assert ahead.answer(waits, NothingNewer).number == 1
    assert late.answer(late.join(8, mode="update", have=KEY), NothingNewer).number == 1
    for p in t:
        p.answer(p.unpublish(), Ok)
    publish(t, 2)
    both = [p.join(9, mode="update", have=KEY) for p in (ahead, late)]
    assert {p.answer(n, Promise).number for p, n in zip((ahead, late), both, strict=True)} == {2}
    assert check(hub.state) == []


def test_what_was_promised_to_the_shard_that_waits_is_held_for_it() -> None:
    """The trainer takes back version 2, which the later round was promised, while the earlier one still goes on."""
    hub = Hub(server_epoch=2)
    old = [back(hub, "other", k, number=1) for k in (0, 1)]
    t = [back(hub, "trainer", k, number=2, high=(1, 2)) for k in (0, 1)]
    ahead = back(hub, "reader", 0, ended=Ended(7, KEY), high=(1, 2))
    waits = ahead.join(8, again=True, promised=(1, 2))
    late = back(hub, "reader", 1, ended=Ended(6))
    asked = late.join(7, again=True, promised=KEY)
    withdrawn = [p.unpublish() for p in t]
    grace(hub)
    assert all(n not in p.answers for p, n in zip(t, withdrawn, strict=True))
    finish(late, 7, asked)
    assert ahead.answer(waits, Promise).number == 2
    assert len(old) == 2
    assert check(hub.state) == []


@pytest.mark.parametrize("end", ["it leaves", "its process is gone"])
def test_the_round_that_waits_can_end_before_its_turn(end: str) -> None:
    hub, _ = restarted()
    ahead = back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
    waits = ahead.join(8, mode="update", have=KEY, again=True)
    late = back(hub, "reader", 1, ended=Ended(6))
    asked = late.join(7, again=True, promised=KEY)
    if end == "its process is gone":
        again = back(hub, "reader", 0, high=None, token="another life")
        assert late.answer(asked, Failure).code == "state_error"
        late = back(hub, "reader", 1, ended=Ended(7))
        assert told(again) == told(late) == 9
        return
    ahead.call(LeaveRound(8, "deadline_exceeded", "too late"), Ok)
    assert ahead.answer(waits, Failure).code == "deadline_exceeded"
    assert back(hub, "reader", 0, number=1, ended=Ended(7, KEY)).session
    grace(hub)
    finish(late, 7, asked)
    assert late.answer(late.join(8, mode="update", have=KEY), Failure).code == "deadline_exceeded", "as the other heard"
    assert check(hub.state) == []


@pytest.mark.parametrize("first", ["the earlier", "the later"])
@pytest.mark.parametrize("ended", [Ended(7), Ended(9, KEY)])
def test_a_round_that_cannot_end_as_it_did_breaks_at_once_and_the_next_call_meets_the_other(
    ended: Ended, first: str
) -> None:
    hub, _ = restarted()
    number = ended.round + 1
    if first == "the later":
        ahead = back(hub, "reader", 0, ended=ended)
        waits = ahead.join(number, again=True)
    late = back(hub, "reader", 1, ended=Ended(6))
    asked = late.join(7, again=True, promised=KEY)
    if first == "the earlier":
        ahead = back(hub, "reader", 0, ended=ended)
        waits = ahead.join(number, again=True)
    assert late.answer(asked, Failure).code == "state_error", "without waiting for the end of the grace"
    late = back(hub, "reader", 1, ended=Ended(7))
    assert told(late) == number
    meets = late.join(number)
    grace(hub)
    assert {ahead.answer(waits, Promise).number, late.answer(meets, Promise).number} == {1}
    assert check(hub.state) == []


def test_a_new_call_that_came_before_the_others_were_heard_gets_what_they_got() -> None:
    """Shard 1 made its call of round 7 after the restart; shard 0 had ended that one, and comes back in round 8."""
    hub, _ = restarted()
    late = back(hub, "reader", 1, ended=Ended(6))
    asked = late.join(told(late))
    ahead = back(hub, "reader", 0, number=1, ended=Ended(7, KEY))
    waits = ahead.join(8, mode="update", have=KEY, again=True)
    grace(hub)
    finish(late, 7, asked)
    assert ahead.answer(waits, NothingNewer).number == 1
    assert check(hub.state) == []


def test_a_new_process_that_was_counted_from_zero_calls_again_and_meets_who_comes_back() -> None:
    hub, _ = restarted()
    fresh = back(hub, "reader", 0, high=None, token="another life")
    asked = fresh.join(told(fresh))
    late = back(hub, "reader", 1, ended=Ended(6))
    waits = late.join(7, again=True, promised=KEY)
    assert "call again" in fresh.answer(asked, Failure).message
    fresh = back(hub, "reader", 0, high=None, token="another life", ended=Ended(0))
    assert told(fresh) == 7
    meets = fresh.join(7)
    grace(hub)
    assert {late.answer(waits, Promise).number, fresh.answer(meets, Promise).number} == {1}
    assert check(hub.state) == []
