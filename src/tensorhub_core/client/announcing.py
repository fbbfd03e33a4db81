"""When a read's progress is announced; pure, time is an argument.

What a follower may read and when it hears of it make up its lag, so progress is announced often. But a hub can only
take so much: one that is told by a thousand workers fifty times a second each has more to do than time. So the next
announcement waits for the answer to the last one. Then a hub that is busy hears fewer of them, each as new as can be,
instead of all of them, later and later.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_core.state.messages import Reply

ANNOUNCE_S = 0.02
"""Least time between two announcements of a longer prefix."""
SEEN_S = 0.2
"""The same where followers see the prefix for themselves (`prefix_word`): the hub needs it to choose sources by, and
tells those who cannot look."""
STATUS_S = 0.5
"""Least time between two that only show how many bytes have come."""
UNANSWERED_S = 2.0
"""An announcement that has no answer for so long is made again: nothing is waited for without an end."""


class Announcing:
    """What one round has announced. `note` belongs to one thread; the answer may come on another."""

    def __init__(self, announce_s: float = ANNOUNCE_S) -> None:
        self._announce_s = announce_s
        self.told = (0, 0)
        """The prefix and the bytes that were announced last."""
        self._told_s = 0.0
        self._unanswered: object | None = None
        self._life = 0

    def begin(self) -> None:
        """Announce everything anew: what was announced counts no more."""
        self.told = (0, 0)

    def is_due(self, figures: tuple[int, int], life: int, now: float, seen: bool = False) -> bool:
        """Tell whether to announce these figures now, in this life of the session.

        `seen`: followers see the prefix for themselves; the first one is announced as soon as ever. An answer that an
        earlier life owes never comes.
        """
        since_s = now - self._told_s
        if self._unanswered is not None and self._life == life and since_s < UNANSWERED_S:
            return False
        longer_s = max(self._announce_s, SEEN_S) if seen and self.told[0] else self._announce_s
        return figures != self.told and since_s >= (longer_s if figures[0] > self.told[0] else STATUS_S)

    def note(self, figures: tuple[int, int], life: int, now: float) -> Callable[[Reply], None]:
        """Note an announcement; returns what to call with its answer."""
        self.told, self._told_s, self._life = figures, now, life
        this = self._unanswered = object()

        def answered(_: Reply) -> None:
            if self._unanswered is this:
                self._unanswered = None

        return answered
