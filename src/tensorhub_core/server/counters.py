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
class _Window:
    """The lines of one kind since `since_s`."""

    since_s: float
    said: int = 0
    skipped: int = 0


@dataclass(slots=True)
class RateLimitedLog:
    """Log few lines per kind in any `every_s` seconds, and say how many were left out."""

    logger: logging.Logger
    every_s: float = 5.0
    _windows: dict[str, _Window] = field(default_factory=dict)

    def log(self, kind: str, level: int, text: str, now: float, *, most: int = 1, trace: bool = False) -> bool:
        """Log `text` unless `most` lines of this `kind` were logged lately; return whether it was."""
        window = self._windows.get(kind)
        skipped = 0
        if window is None or now - window.since_s >= self.every_s:
            skipped = 0 if window is None else window.skipped
            window = self._windows[kind] = _Window(now)
        if window.said >= most:
            window.skipped += 1
            return False
        window.said += 1
        self.logger.log(level, "%s%s", text, f" ({skipped:,} more like it)" if skipped else "", exc_info=trace)
        return True
