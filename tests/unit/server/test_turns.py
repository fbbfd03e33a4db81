"""The order in which messages that are there are taken."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tensorhub_core.ids import SessionId
from tensorhub_core.server import turns
from tensorhub_core.server.turns import QUICK_IN_A_ROW, Turns
from tensorhub_core.state.events import Received
from tensorhub_core.state.messages import Announce, Filling, GetStatus, Heartbeat, JoinRound, Relocate, Request

JOIN, QUICK = JoinRound(0, None, "update"), Heartbeat()


def said(session: str, request: int, message: Request = QUICK) -> Received:
    return Received(SessionId(session.encode()), request, message)


def drained(waiting: Turns) -> list[tuple[str, int]]:
    found = []
    while (each := waiting.take()) is not None:
        found.append((each.session.decode(), each.request))
    return found


def test_what_is_quick_goes_before_what_takes_long() -> None:
    waiting = Turns()
    long = said("a", 1, JOIN), said("b", 1, GetStatus()), said("e", 1, Announce(0, 1, 100))
    for each in (*long, said("c", 1), said("d", 1, Filling(0))):
        waiting.put(each, 10)
    assert len(waiting) == 5
    assert drained(waiting) == [("c", 1), ("d", 1), ("a", 1), ("b", 1), ("e", 1)]
    assert len(waiting) == 0


def test_messages_of_a_session_keep_their_order() -> None:
    waiting = Turns()
    for each in (said("a", 1), said("a", 2, JOIN), said("a", 3), said("b", 1, Relocate(0, ())), said("a", 4)):
        waiting.put(each, 10)
    waiting.put(said("c", 1), 10)
    assert drained(waiting) == [("a", 1), ("c", 1), ("a", 2), ("a", 3), ("b", 1), ("a", 4)]
    waiting.put(said("b", 2, JOIN), 10)
    waiting.put(said("a", 5), 10)
    assert drained(waiting) == [("a", 5), ("b", 2)], "nothing of a is in the way any more"


def test_what_takes_long_gets_its_turn_all_the_same() -> None:
    waiting = Turns()
    waiting.put(said("a", 1, JOIN), 10)
    for number in range(3 * QUICK_IN_A_ROW):
        waiting.put(said("b", number), 10)
    assert drained(waiting).index(("a", 1)) == QUICK_IN_A_ROW


def test_who_is_quick_need_not_wait_unless_something_of_it_does_or_others_have_waited_too_long() -> None:
    waiting = Turns()
    assert waiting.passes(said("a", 1))
    assert not waiting.passes(said("a", 2, JOIN))
    waiting.put(said("a", 2, JOIN), 10)
    assert not waiting.passes(said("a", 3)), "it would overtake its own join"
    assert [waiting.passes(said("b", number)) for number in range(QUICK_IN_A_ROW + 1)] == [
        *[True] * QUICK_IN_A_ROW,
        False,
    ]
    waiting.put(said("b", 99), 10)
    assert drained(waiting) == [("a", 2), ("b", 99)]


def test_more_is_read_only_while_nothing_quick_waits_and_there_is_room() -> None:
    waiting = Turns()
    assert waiting.wants
    waiting.put(said("a", 1), 10)
    assert not waiting.wants
    assert waiting.take() is not None
    waiting.put(said("a", 2, JOIN), turns.MOST_WAITING_BYTES - 1)
    assert waiting.wants
    waiting.put(said("b", 2, JOIN), 1)
    assert not waiting.wants, "no room in bytes"
    drained(waiting)
    for number in range(turns.MOST_WAITING):
        assert waiting.wants
        waiting.put(said("a", number, JOIN), 10)
    assert not waiting.wants, "no room for more messages"


MESSAGES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((JOIN, QUICK))), max_size=40)


@given(MESSAGES, st.lists(st.booleans(), max_size=60))
def test_everything_is_taken_once_and_each_session_in_order(
    messages: list[tuple[str, Request]], takes: list[bool]
) -> None:
    waiting, put, taken = Turns(), [], []
    ahead = list(enumerate(messages))
    for take in (*takes, *[False] * len(messages), *[True] * len(messages)):
        if take and (each := waiting.take()) is not None:
            taken.append(each)
        elif not take and ahead:
            number, (session, message) = ahead.pop(0)
            put.append(said(session, number, message))
            if waiting.wants and waiting.passes(put[-1]):
                taken.append(put[-1])
            else:
                waiting.put(put[-1], 10)
    assert not len(waiting)
    for session in "abc":
        name = SessionId(session.encode())
        assert [each for each in taken if each.session == name] == [each for each in put if each.session == name]
    assert len(taken) == len(put)
    assert waiting.wants
