"""Progress is announced often, but never faster than the hub answers."""

from __future__ import annotations

from tensorhub_core.client.announcing import ANNOUNCE_S, SEEN_S, STATUS_S, UNANSWERED_S, Announcing
from tensorhub_core.state.messages import Failure, Ok


def test_a_longer_prefix_is_announced_soon_and_bytes_alone_seldom() -> None:
    announcing = Announcing()
    announcing.note((1, 100), 1, 10.0)(Ok())
    assert not announcing.is_due((2, 200), 1, 10.0 + 0.9 * ANNOUNCE_S)
    assert announcing.is_due((2, 200), 1, 10.0 + 1.1 * ANNOUNCE_S)
    assert not announcing.is_due((1, 200), 1, 10.0 + 0.9 * STATUS_S)
    assert announcing.is_due((1, 200), 1, 10.0 + 1.1 * STATUS_S)
    assert not announcing.is_due((1, 100), 1, 100.0)


def test_what_followers_see_themselves_is_announced_seldom_but_for_the_first_of_it() -> None:
    announcing = Announcing()
    announcing.note((0, 50), 1, 10.0)(Ok())
    assert announcing.is_due((1, 100), 1, 10.0 + 1.1 * ANNOUNCE_S, seen=True)
    announcing.note((1, 100), 1, 11.0)(Ok())
    assert not announcing.is_due((2, 200), 1, 11.0 + 0.9 * SEEN_S, seen=True)
    assert announcing.is_due((2, 200), 1, 11.0 + 0.9 * SEEN_S)
    assert announcing.is_due((2, 200), 1, 11.0 + 1.1 * SEEN_S, seen=True)


def test_the_next_one_waits_for_the_answer_to_the_last() -> None:
    announcing = Announcing()
    answered = announcing.note((1, 100), 1, 10.0)
    assert not announcing.is_due((9, 900), 1, 10.0 + 0.9 * UNANSWERED_S)
    answered(Ok())
    assert announcing.is_due((9, 900), 1, 10.0 + 0.9 * UNANSWERED_S)


def test_a_refusal_is_an_answer() -> None:
    announcing = Announcing()
    announcing.note((1, 100), 1, 10.0)(Failure("state_error", "the round is over"))
    assert announcing.is_due((2, 200), 1, 10.1)


def test_an_answer_that_does_not_come_is_not_waited_for_without_end() -> None:
    announcing = Announcing()
    late = announcing.note((1, 100), 1, 10.0)
    assert announcing.is_due((2, 200), 1, 10.0 + UNANSWERED_S)
    answered = announcing.note((2, 200), 1, 10.0 + UNANSWERED_S)
    late(Ok())
    assert not announcing.is_due((3, 300), 1, 10.1 + UNANSWERED_S)
    answered(Ok())
    assert announcing.is_due((3, 300), 1, 10.1 + UNANSWERED_S)


def test_an_earlier_life_of_the_session_owes_no_answer() -> None:
    announcing = Announcing()
    announcing.note((1, 100), 1, 10.0)
    announcing.begin()
    assert announcing.is_due((1, 100), 2, 10.1)
