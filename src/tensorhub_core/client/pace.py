"""Compare the sources of one read with each other: who is a straggler, and who is worth asking; pure.

Time is an argument. Only time in which a source is asked for something counts, and what is on its way is counted in its
favour: a source that delivers in large pieces is not taken for one that delivers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

STRAGGLER_SHARE = 1 / 8
"""A source below this share of the best one's rate is left."""
JUDGED_S = 1.0
"""A source is asked for so long before it is judged."""
_LEAST_PATIENCE_S = 0.25


class Pace:
    """How fast one source gives what it is asked for, over about the last two seconds of being asked."""

    def __init__(self) -> None:
        self.flying_bytes = 0
        """What it was asked for and has not given yet."""
        self._flights = 0
        self._since_s: float | None = None
        """When it was asked last after it had nothing to do; None while it has nothing to do."""
        self._busy_s = 0.0
        self._got_bytes = 0
        self._before = (0, 0.0)
        self._bound: float | None = None

    def posted(self, length_bytes: int, now: float) -> None:
        """Count what it was asked for."""
        if self._since_s is None:
            self._since_s = now
        self._flights += 1
        self.flying_bytes += length_bytes

    def ended(self, length_bytes: int, now: float) -> None:
        """Count what it has given."""
        self._flights -= 1
        self.flying_bytes -= length_bytes
        self._got_bytes += length_bytes
        busy_s = self._asked_s(now)
        if busy_s >= JUDGED_S:
            self._bound = (self._got_bytes + self.flying_bytes) / busy_s
            self._before, self._got_bytes, busy_s = (self._got_bytes, busy_s), 0, 0.0
        self._busy_s = busy_s
        self._since_s = now if self._flights else None

    def paused(self, now: float) -> None:
        """Forget what was measured: this process did not run meanwhile."""
        self._busy_s, self._got_bytes, self._before, self._bound = 0.0, 0, (0, 0.0), None
        self._since_s = None if self._since_s is None else now

    def at_most(self, now: float) -> float | None:
        """Return the bytes per second it can have had at most lately; None before it was asked for long enough."""
        busy_s = self._asked_s(now)
        return (self._got_bytes + self.flying_bytes) / busy_s if busy_s >= JUDGED_S else self._bound

    def rate(self, now: float) -> float:
        """Return the bytes per second it gives; 0 if it has given nothing yet."""
        got_bytes, busy_s = self._before[0] + self._got_bytes, self._before[1] + self._asked_s(now)
        rate = got_bytes / busy_s if got_bytes and busy_s > 0 else 0.0
        bound = self.at_most(now)
        return rate if bound is None else min(rate, bound)

    def _asked_s(self, now: float) -> float:
        return self._busy_s + (0.0 if self._since_s is None else now - self._since_s)


def straggler(paces: Sequence[Pace], now: float) -> int | None:
    """Return the slowest source if it is far slower than the best of the others."""
    bounds = [pace.at_most(now) for pace in paces]
    judged = [(bound, number) for number, bound in enumerate(bounds) if bound is not None]
    if not judged or len(paces) < 2:
        return None
    bound, slowest = min(judged)
    best = max(pace.rate(now) for number, pace in enumerate(paces) if number != slowest)
    return slowest if bound < STRAGGLER_SHARE * best else None


def patience_s(flying_bytes: int, others: Sequence[Pace], now: float) -> float:
    """Return how long to wait for what a straggler still owes when all else is done."""
    best = max((pace.rate(now) for pace in others), default=0.0)
    return _LEAST_PATIENCE_S + (2 * flying_bytes / best if best else 0.0)


def worthwhile(pace: Pace, others: Sequence[Pace], ask_bytes: int, left_bytes: int, now: float) -> bool:
    """Tell whether a source would give `ask_bytes` sooner than one of the others could give all that is left.

    Near the end, a slow source would otherwise be waited for when everybody else is done.
    """
    rate = pace.rate(now)
    if not rate:
        return True
    needs_s = (pace.flying_bytes + ask_bytes) / rate
    return all(
        needs_s <= (other.flying_bytes + left_bytes) / other_rate
        for other in others
        if (other_rate := other.rate(now)) > 0
    )
