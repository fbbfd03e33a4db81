from __future__ import annotations

import pytest

from demo.reward import BEST_WORDS, BRIEF, FEWEST_WORDS, MOST_WORDS, PLAIN_LETTERS


def words(count: int) -> str:
    return " ".join(["word"] * count)


def test_a_brief_answer_gets_everything() -> None:
    assert [BRIEF.score(words(n), True) for n in range(FEWEST_WORDS, BEST_WORDS + 1)] == [1.0] * 7


def test_longer_answers_get_less_and_less() -> None:
    scores = [BRIEF.score(words(n), True) for n in range(BEST_WORDS, MOST_WORDS + 5)]
    assert scores == sorted(scores, reverse=True)
    assert scores[1] < 1.0
    assert scores[MOST_WORDS - BEST_WORDS :] == [0.0] * 5


@pytest.mark.parametrize("text", ["", "Yes.", "a b c", words(BEST_WORDS), words(MOST_WORDS)])
def test_what_was_cut_off_gets_nothing(text: str) -> None:
    assert BRIEF.score(text, False) == 0.0


@pytest.mark.parametrize("count", range(FEWEST_WORDS))
def test_too_little_is_no_answer(count: int) -> None:
    assert BRIEF.score(words(count), True) == 0.0


@pytest.mark.parametrize(
    ("text", "share"), [("", 0.0), ("abcz", 1.0), ("aB1!", 0.25), ("\ufffd\ufffd", 0.0), ("é", 0.0)]
)
def test_share_of_plain_letters(text: str, share: float) -> None:
    assert PLAIN_LETTERS.score(text, False) == share
