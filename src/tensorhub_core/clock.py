"""Give time as an argument: acting code takes a `Clock`, deciding code takes `now`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds."""

    def now(self) -> float:
        """Return monotonic seconds."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time by which a call has to end; None = never."""

    at_s: float | None

    @classmethod
    def after(cls, timeout_s: float | None, now: float) -> Deadline:
        """Return the deadline `timeout_s` from now; None = never."""
        return cls(None if timeout_s is None else now + timeout_s)

    def left_s(self, now: float, most_s: float) -> float:
        """Return the seconds left, between 0 and `most_s`."""
        return most_s if self.at_s is None else max(0.0, min(most_s, self.at_s - now))

    def passed(self, now: float) -> bool:
        """Tell whether the deadline has passed."""
        return self.at_s is not None and now >= self.at_s
