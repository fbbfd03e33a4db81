"""Follow a source that is not whole: look at what it shows, by the client's own rule, and read as far as that goes.

Looks that cannot bring news are not simulated one by one: they are counted when it matters which one comes next. And
once a look has brought news, the reader is as far behind its source as it is then, for as long as the source comes on
at the same rate: it looks again before it has read what it may. A reader that is faster than its source waits for news
most of the time; how late it gets them is taken as their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.sim.events import Events, Timer
from bench.sim.reads import Part, Read

from tensorhub_core.client.looking import LEAST_PAUSE_S, MOST_PAUSE_S, Look

_ROUNDING_S = 1e-9
_ROUNDING_BYTES = 64.0


class Word(NamedTuple):
    """What a source shows: how many bytes are verified, and how many more every second.

    Of what it reads `landed_bytes` are not in flight; they count again when they are more than was verified before.
    """

    verified_bytes: float
    landed_bytes: float
    rate: float


NOTHING = Word(0.0, 0.0, 0.0)


@dataclass(eq=False)
class Follow:
    """One source of one read. `word()` is what it shows now; a look arrives there after `latency_s`."""

    events: Events
    read: Read
    lease: str
    part: Part
    word: Callable[[], Word]
    segment_bytes: int
    latency_s: float
    lost: Callable[[], None]
    """To be called when the source dies."""
    looks: bool = True
    look: Look = field(default_factory=Look)
    _timer: Timer | None = None
    _asked: bool = False

    def __post_init__(self) -> None:
        if self.looks:
            self.part.starved = self.starved
            self.part.early_s, self.part.early_bytes = 2 * self.latency_s, 4.0 * self.segment_bytes

    def end(self) -> None:
        """Look no more."""
        self.looks = False
        if self._timer is not None:
            self._timer.cancel()

    def starved(self) -> None:
        """Begin to look: what may be read is used up."""
        self.look.due_s = max(self.look.due_s, self.events.now)
        self._plan()

    def source_moved(self) -> None:
        """Take in that the source shows something else, or comes on at another rate."""
        if not self.looks or self.read.over or self.part.gone:
            return
        if not self.part.slope:
            return self._plan()
        now, rides, word = self.events.now, self.part.rides, self.word()
        if word.rate > 0:
            if word.rate != self.part.slope:
                self.read.slow_down(self.lease, word.rate)
            return
        if rides:  # it was waiting for news already
            pause_s = pause_before_news(self.segment_bytes / self.part.slope, self.latency_s)
            self.look.pause_s, self.look.due_s = LEAST_PAUSE_S, now + pause_s / 2
        self.read.slow_down(self.lease, 0.0)

    # --- looks ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Look when there is news to be had, at the first look that can bring them; without any, wait for the source.

        The looks until now have brought nothing.
        """
        if not self.part.told or self._asked or not self.looks or self.read.over:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now, word = self.events.now, self.word()
        skip(self.look, now - self.latency_s, self.latency_s)
        news = min(self.part.limit + self.segment_bytes, self.read.total)
        news_s = now
        if word.verified_bytes < news - _ROUNDING_BYTES:
            if not word.rate:
                return
            news_s = now + (news - word.landed_bytes) / word.rate
        next_look = Look(self.look.pause_s, self.look.due_s)
        skip(next_look, news_s - self.latency_s, self.latency_s)
        self._timer = self.events.at(next_look.due_s + self.latency_s, self._see, next_look)

    def _see(self, look: Look) -> None:
        """Read the word; the answer is on its way."""
        self._timer, self._asked, self.look = None, True, look
        look.asked(self.events.now - self.latency_s)
        verified = self.word().verified_bytes + _ROUNDING_BYTES
        seen = self.read.total if verified >= self.read.total else verified // self.segment_bytes * self.segment_bytes
        self.events.later(self.latency_s, self._hear, float(seen))

    def _hear(self, seen: float) -> None:
        self._asked = False
        news = seen > self.part.limit
        self.look.answered(news, self.events.now)
        if self.read.over or not self.looks:
            return
        if not news:
            return self._plan()
        word = self.word()
        if word.rate > 0 and seen < self.read.total and word.landed_bytes >= word.verified_bytes:
            segment_s = self.segment_bytes / word.rate
            late_s = pause_before_news(segment_s, self.latency_s) / 2 + self.latency_s + segment_s / 2
            self.read.follow(self.lease, seen, word.rate, late_s)
        else:
            self.read.advance(self.lease, seen)


def skip(look: Look, until_s: float, latency_s: float) -> None:
    """Let all looks pass that begin before a time, without news."""
    until_s -= _ROUNDING_S
    while look.due_s < until_s:
        if look.pause_s == MOST_PAUSE_S:
            cycle_s = MOST_PAUSE_S + 2 * latency_s
            look.due_s += cycle_s * math.ceil((until_s - look.due_s) / cycle_s)
            return
        look.answered(False, look.due_s + 2 * latency_s)


def pause_before_news(news_s: float, latency_s: float) -> float:
    """Return how long a reader that waits for news has not looked when they come, if they come every `news_s`."""
    look = Look(LEAST_PAUSE_S, LEAST_PAUSE_S + 2 * latency_s)
    while look.due_s < news_s and look.pause_s < MOST_PAUSE_S:
        look.answered(False, look.due_s + 2 * latency_s)
    return look.pause_s + 2 * latency_s
