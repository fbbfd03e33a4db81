"""How long the loop lets messages come together before it looks again; pure.

Waking up costs more than a heartbeat: the heartbeats of ten thousand idle workers, each taken as it comes, would keep a
core busy that does nothing else. With so many workers and messages, a pause of at most two milliseconds takes several
at a time. A hub of few workers never pauses, however fast they ask one thing after the other.
"""

from __future__ import annotations

MANY_WORKERS = 500
"""With fewer connections a message is always taken as it comes."""
BUSY_RATE = 1000.0
"""So are messages a second that are fewer than this."""
ENOUGH = 16
"""Messages that are worth waking up for. Who found twice as many has enough to do, and looks again at once."""
MOST_PAUSE_S = 0.002
_WINDOW_S = 0.1


class Pace:
    """Measure how many messages come, and say how long to leave them."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._count = 0
        self._rate = 0.0

    def pause_s(self, workers: int, taken: int, now: float) -> float:
        """Return how long to wait after so many messages were taken at once, at monotonic time `now`."""
        self._count += taken
        elapsed_s = now - self._since_s
        if elapsed_s >= _WINDOW_S:
            self._rate, self._count, self._since_s = self._count / elapsed_s, 0, now
        if workers < MANY_WORKERS or self._rate < BUSY_RATE or taken >= 2 * ENOUGH:
            return 0.0
        return min(MOST_PAUSE_S, ENOUGH / self._rate)
