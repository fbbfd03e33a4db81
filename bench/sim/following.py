"""Follow a source that is not whole: look at what it shows, by the client's own rule, and read as far as that goes.

Looks that cannot bring news are not simulated one by one: they are counted when it matters which one comes next. And
once a look has brought news, the reader is as far behind its source as it is then, for as long as the source comes on
at the same rate: it looks again before it has read what it may. A reader that is faster than its source waits for news
most of the time; how late it gets them is taken as their mean.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.sim.events import Events, Timer
from bench.sim.reads import Part, Read

from tensorhub_core.client.looking import MOST_PAUSE_S, Look

_ROUNDING_S = 1e-9
_ROUNDING_BYTES = 64.0
_NEWS = 50
"""Of so many it is seen how late they are, when as many have been heard before."""


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
            late_s, self.look = waiting(self.segment_bytes / self.part.slope, self.latency_s, now)
            self.look.due_s = now + max(0.0, late_s - self.latency_s)
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
        next_look = copy.copy(self.look)
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
            late_s, _ = waiting(segment_s, self.latency_s, self.events.now)
            self.read.follow(self.lease, seen, word.rate, late_s + self.latency_s + segment_s / 2)
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


def waiting(news_s: float, latency_s: float, now: float) -> tuple[float, Look]:
    """Return how late a reader that waits for news reads them, on average, and how it looks, with news every `news_s`.

    The last of them were heard now.
    """
    late_s, look, heard_s = _waiting(float(f"{news_s:.2g}"), latency_s)
    look = copy.copy(look)
    look.due_s += now - heard_s
    if getattr(look, "news_s", None) is not None:
        look.news_s = now
    return late_s, look


@functools.lru_cache
def _waiting(news_s: float, latency_s: float) -> tuple[float, Look, float]:
    look, heard, counted, late_s, heard_s = Look(due_s=0.0), 0, 0, 0.0, 0.0
    while counted < _NEWS:
        read_s = look.due_s + latency_s
        by_now = math.floor(read_s / news_s + _ROUNDING_S)
        news = by_now - heard
        if news:
            heard_s = read_s + latency_s
        if heard >= _NEWS:
            counted += news
            late_s += news * (read_s - news_s * (heard + 1 + by_now) / 2)
        heard = by_now
        look.answered(news > 0, read_s + latency_s)
    return late_s / counted, look, heard_s
