"""How fast a copy fills, and whether it is far slower than others of its version; pure, time is an argument.

A reader of a single source cannot know whether the source is slow or the version is: only the server sees others read.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOW_SHARE = 1 / 8
"""A copy that fills at less than this share of the best one's rate fills slowly."""
WINDOW_S = 3.0
"""A rate is measured over at least this time."""
_LEAST_S = 0.5
"""A read that took less tells nothing by its end."""


@dataclass(slots=True)
class Speed:
    """Measures one copy that fills. `bytes_per_s` is None until it was measured for a whole window."""

    bytes_per_s: float | None = None
    begun_s: float | None = None
    begun_bytes: int = 0
    done_bytes: int = 0

    def note(self, done_bytes: int, now: float) -> None:
        """Take what is verified by now; the first time only begins to measure: a reader may bring bytes along."""
        if self.begun_s is None:
            self.begun_s, self.begun_bytes = now, done_bytes
        self.done_bytes = max(self.done_bytes, done_bytes)

    def measure(self, now: float) -> None:
        """Take the rate of a window that is over."""
        if self.begun_s is not None and now - self.begun_s >= WINDOW_S:
            self._take(now)

    def finish(self, done_bytes: int, now: float) -> None:
        """Take the rate of the last window, which may be short."""
        if self.begun_s is not None and now - self.begun_s >= _LEAST_S:
            self.done_bytes = max(self.done_bytes, done_bytes)
            self._take(now)
        self.begun_s = None

    def _take(self, now: float) -> None:
        assert self.begun_s is not None
        self.bytes_per_s = (self.done_bytes - self.begun_bytes) / (now - self.begun_s)
        self.begun_s, self.begun_bytes = now, self.done_bytes


def is_slow(mine: Speed, others: list[Speed]) -> bool:
    """Tell whether a copy fills far more slowly than the best of the others does, or did."""
    if mine.bytes_per_s is None:
        return False
    best = max((other.bytes_per_s or 0.0 for other in others if other is not mine), default=0.0)
    return mine.bytes_per_s < SLOW_SHARE * best
