"""Count what the server loop did, and keep hostile traffic from filling the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Messages since the start of the loop; written by its thread, readable from any."""

    received: int = 0
    sent: int = 0
    hellos: int = 0
    """Hellos of workers; observers are not counted."""
    malformed: int = 0
    """Not a message of this protocol: dropped, or answered with a failure when its header could be read."""
    mismatched: int = 0
    """Of another protocol version: answered with `protocol_mismatch`."""
    errors: int = 0
    """The machine raised an exception: always a programming error of the server."""
    slow: int = 0
    """Not sent because the receiver does not read."""
    gone: int = 0
    """Not sent because the connection is gone."""


@dataclass(slots=True)
class RateLimitedLog:
    """Log at most one line per kind and `every_s` seconds, and say how many were left out."""

    logger: logging.Logger
    every_s: float = 5.0
    _last: dict[str, float] = field(default_factory=dict)
    _skipped: dict[str, int] = field(default_factory=dict)

    def log(self, kind: str, level: int, text: str, now: float, *, trace: bool = False) -> bool:
        """Log `text` unless a line of this `kind` was logged less than `every_s` ago; return whether it was."""
        last = self._last.get(kind)
        if last is not None and now - last < self.every_s:
            self._skipped[kind] = self._skipped.get(kind, 0) + 1
            return False
        self._last[kind] = now
        skipped = self._skipped.pop(kind, 0)
        self.logger.log(level, "%s%s", text, f" ({skipped:,} more like it)" if skipped else "", exc_info=trace)
        return True
