"""Say how good an answer is, by rules that a reader checks at a glance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FEWEST_WORDS = 4
BEST_WORDS = 10
MOST_WORDS = 36


@dataclass(frozen=True)
class Rule:
    """A named rule: `score(text, finished)` is between 0 and 1; `finished` is False for an answer that was cut off.

    `about_words`: whether the number of words is what the rule is about.
    """

    name: str
    says: str
    score: Callable[[str, bool], float]
    about_words: bool = False


def _brief(text: str, finished: bool) -> float:
    words = len(text.split())
    if not finished or words < FEWEST_WORDS:
        return 0.0
    return min(1.0, max(0.0, (MOST_WORDS - words) / (MOST_WORDS - BEST_WORDS)))


def _plain_letters(text: str, finished: bool) -> float:
    return sum("a" <= character <= "z" for character in text) / len(text) if text else 0.0


BRIEF = Rule(
    name="brief",
    says=f"1 for an answer of {FEWEST_WORDS} to {BEST_WORDS} words, less for a longer one, 0 for one that rambles on",
    score=_brief,
    about_words=True,
)
PLAIN_LETTERS = Rule(
    name="plain letters",
    says="the share of the answer's characters that are letters from a to z",
    score=_plain_letters,
)
