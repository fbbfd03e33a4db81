"""Give time as an argument: acting code takes a `Clock`, deciding code takes `now`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol, SupportsFloat

from tensorhub_core.errors import ConfigError

_MOST_S = 1e9
"""More seconds than any call waits; threads cannot wait for infinity."""


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
        """Return the deadline `timeout_s` from now; None = never. Raises ConfigError if that is no number."""
        return cls(None if timeout_s is None else now + _seconds(timeout_s))

    def left_s(self, now: float, most_s: float) -> float:
        """Return the seconds left, between 0 and `most_s`."""
        return most_s if self.at_s is None else max(0.0, min(most_s, self.at_s - now))

    def passed(self, now: float) -> bool:
        """Tell whether the deadline has passed."""
        return self.at_s is not None and now >= self.at_s


def _seconds(timeout_s: object) -> float:
    if not isinstance(timeout_s, SupportsFloat) or math.isnan(float(timeout_s)):
        raise ConfigError(f"timeout_s is a number of seconds or None, not {timeout_s!r}")
    return min(float(timeout_s), _MOST_S)
