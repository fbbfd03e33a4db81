"""The order in which messages that are there are taken."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tensorhub_core.ids import SessionId
from tensorhub_core.server import turns
from tensorhub_core.server.turns import QUICK_IN_A_ROW, Turn, Turns
from tensorhub_core.state.messages import Announce, Filling, GetStatus, Heartbeat, JoinRound, Relocate, Request

JOIN, QUICK = JoinRound(0, None, "update"), Heartbeat()


def turn(session: str, request: int, message: Request = QUICK, size_bytes: int = 10) -> Turn:
    return Turn(SessionId(session.encode()), request, message, size_bytes)


def drained(waiting: Turns) -> list[tuple[str, int]]:
    found = []
    while (each := waiting.take()) is not None:
        found.append((each.session.decode(), each.request))
    return found


def test_what_is_quick_goes_before_what_takes_long() -> None:
    waiting = Turns()
    long = turn("a", 1, JOIN), turn("b", 1, GetStatus()), turn("e", 1, Announce(0, 1, 100))
    for each in (*long, turn("c", 1), turn("d", 1, Filling(0))):
        waiting.put(each)
    assert len(waiting) == 5
    assert drained(waiting) == [("c", 1), ("d", 1), ("a", 1), ("b", 1), ("e", 1)]
    assert len(waiting) == 0


def test_messages_of_a_session_keep_their_order() -> None:
    waiting = Turns()
    for each in (turn("a", 1), turn("a", 2, JOIN), turn("a", 3), turn("b", 1, Relocate(0, ())), turn("a", 4)):
        waiting.put(each)
    waiting.put(turn("c", 1))
    assert drained(waiting) == [("a", 1), ("c", 1), ("a", 2), ("a", 3), ("b", 1), ("a", 4)]
    waiting.put(turn("b", 2, JOIN))
    waiting.put(turn("a", 5))
    assert drained(waiting) == [("a", 5), ("b", 2)], "nothing of a is in the way any more"


def test_what_takes_long_gets_its_turn_all_the_same() -> None:
    waiting = Turns()
    waiting.put(turn("a", 1, JOIN))
    for number in range(3 * QUICK_IN_A_ROW):
        waiting.put(turn("b", number))
    assert drained(waiting).index(("a", 1)) == QUICK_IN_A_ROW


def test_more_is_read_only_while_nothing_quick_waits_and_there_is_room() -> None:
    waiting = Turns()
    assert waiting.wants
    waiting.put(turn("a", 1))
    assert not waiting.wants
    assert waiting.take() is not None
    waiting.put(turn("a", 2, JOIN, turns.MOST_WAITING_BYTES - 1))
    assert waiting.wants
    waiting.put(turn("b", 2, JOIN, 1))
    assert not waiting.wants, "no room in bytes"
    drained(waiting)
    for number in range(turns.MOST_WAITING):
        assert waiting.wants
        waiting.put(turn("a", number, JOIN))
    assert not waiting.wants, "no room for more messages"


MESSAGES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from((JOIN, QUICK))), max_size=40)


@given(MESSAGES, st.lists(st.booleans(), max_size=60))
def test_everything_is_taken_once_and_each_session_in_order(said: list[tuple[str, Request]], takes: list[bool]) -> None:
    waiting, put, taken = Turns(), [], []
    ahead = list(enumerate(said))
    for take in (*takes, *[False] * len(said), *[True] * len(said)):
        if take and (each := waiting.take()) is not None:
            taken.append(each)
        elif not take and ahead:
            number, (session, message) = ahead.pop(0)
            put.append(turn(session, number, message))
            waiting.put(put[-1])
    assert not len(waiting)
    for session in "abc":
        name = SessionId(session.encode())
        assert [each for each in taken if each.session == name] == [each for each in put if each.session == name]
    assert len(taken) == len(put)
    assert waiting.wants
