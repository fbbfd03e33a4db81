"""Decide how much to ask of one source at a time, and when it has stalled; pure, time is an argument.

More is put in flight only while batches come about as quickly as the quickest one did: beyond that they wait in a queue
on the way, and everything behind it, verification and readers that follow, comes later. It is also kept to what the
source delivers in a fraction of the stall timeout, so that a slow but living source is not taken for a dead one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST_BYTES = 256 << 10
_LEAST_BYTES = 256 << 10
"""Fits into the stall timeout at the slowest rate that is allowed."""
_QUICK_SHARE = 0.05
_EASY_S = 0.025
_QUEUE = 3
"""A batch that takes so many times as long as the quickest one, and longer than is easily waited for, has queued."""
_SWIFT_S = 0.004
"""A batch that takes no longer hardly pays for its own posting: the next ones may be larger."""
_BATCH_S = 0.004
"""What a source gives in this time is enough for one batch: what is in it is passed on when all of it has come."""
_FORGET = 0.75
"""What is left, with each batch, of the weight of those before it in the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Bounds of a flow: `window` batches in flight, of up to `chunk_bytes`, or `most_chunk_bytes` where they take only
    milliseconds. A source is left that moves nothing for `stall_timeout_s`, or less than `min_bytes_per_s` over it."""

    chunk_bytes: int = 4 << 20
    most_chunk_bytes: int = 16 << 20
    window: int = 8
    stall_timeout_s: float = 5.0
    min_bytes_per_s: float = 64 << 10


class Flow:
    """What one source has in flight and how it delivers."""

    def __init__(self, settings: FlowSettings) -> None:
        self._settings = settings
        self._chunk_bytes = settings.chunk_bytes
        # Half of what the window may hold, so that one batch is verified while the next one is moved.
        half = settings.chunk_bytes * settings.window // 2
        self._most_chunk_bytes = max(settings.chunk_bytes, min(settings.most_chunk_bytes, half))
        self._budget_bytes = min(_FIRST_BYTES, settings.chunk_bytes * settings.window)
        self._changed_s = -math.inf
        self._limited_s = -math.inf
        self._least_s = math.inf
        """The shortest that a batch took."""
        self._count = 0
        self._bytes = 0
        self._progress_s = 0.0
        self._idle_s: float | None = None
        """When the last batch ended, while nothing is in flight; None before the first."""
        self._lately_bytes = self._lately_s = 0.0
        """What came lately, and in what time of waiting for it."""
        self._since_s = 0.0
        self._since_bytes = 0

    def room_bytes(self) -> int:
        """Return how many bytes the next batch may have; 0 = wait for one to end."""
        if self._count >= self._settings.window:
            return 0
        parts = max(2, min(4, self._settings.window))
        swift = min(self._budget_bytes // parts, self._swiftly_bytes())
        size = min(self._chunk_bytes, max(_LEAST_BYTES, swift, self._budget_bytes // self._settings.window))
        return size if self._count == 0 or self._bytes + size <= self._budget_bytes else 0

    def posted(self, length_bytes: int, now: float) -> None:
        """Count a batch that was posted."""
        if self._count == 0:
            # Time in which nothing was asked for does not count.
            self._since_s = now if self._idle_s is None else self._since_s + now - self._idle_s
            self._progress_s = now
        self._count += 1
        self._bytes += length_bytes

    def ended(self, length_bytes: int, posted_s: float, now: float) -> None:
        """Count a batch that is done, and learn from how long it took."""
        waited_s = now - max(posted_s, self._progress_s)
        self._lately_bytes = _FORGET * self._lately_bytes + length_bytes
        self._lately_s = _FORGET * self._lately_s + waited_s
        self._count -= 1
        self._bytes -= length_bytes
        self._progress_s = now
        self._since_bytes += length_bytes
        self._idle_s = now
        took_s = now - posted_s
        if took_s > _SWIFT_S:
            self._chunk_bytes = self._settings.chunk_bytes
        elif 2 * length_bytes > self._chunk_bytes:
            self._chunk_bytes = min(2 * self._chunk_bytes, self._most_chunk_bytes)
        self._least_s = min(self._least_s, took_s)
        easy_s = min(max(_EASY_S, _QUEUE * self._least_s), _QUICK_SHARE * self._settings.stall_timeout_s)
        if posted_s < self._changed_s:
            return  # it says nothing about the budget as it is now
        if took_s < easy_s and posted_s > self._limited_s:
            self._budget_bytes = min(self._chunk_bytes * self._settings.window, 2 * self._budget_bytes)
            self._changed_s = now
        elif took_s > 1.5 * easy_s:
            self._budget_bytes = max(_LEAST_BYTES, self._budget_bytes // 2)
            self._changed_s = now

    def _swiftly_bytes(self) -> int:
        """Return what comes in the time of a batch, at the rate at which it came lately."""
        if self._lately_s <= 0.0:
            return self._most_chunk_bytes
        return int(min(_BATCH_S * self._lately_bytes / self._lately_s, self._most_chunk_bytes))

    def limited(self, now: float) -> None:
        """Note that there is nothing more to ask for: that so little came quickly says nothing about more.

        Whoever follows an unfinished copy asks for what is new of it: in pieces that are as large as ever may be, it
        would pass each on only when all of it has come, and so would everybody behind.
        """
        self._limited_s = now

    def paused(self, now: float) -> None:
        """Forget the time until now: this process did not run, so the source is not to blame."""
        self._progress_s = self._since_s = now
        self._idle_s = None if self._idle_s is None else now
        self._since_bytes = 0

    def stalled(self, now: float) -> str:
        """Return why the source counts as stalled, or an empty text."""
        if not self._count:
            return ""
        timeout_s = self._settings.stall_timeout_s
        if now - self._progress_s >= timeout_s:
            return f"nothing arrived for {now - self._progress_s:.1f} s while {self._bytes:,} bytes were asked for"
        # Up to the last batch that ended: what is on its way since then counts next time.
        spent_s = self._progress_s - self._since_s
        if spent_s < timeout_s:
            return ""
        rate = self._since_bytes / spent_s
        self._since_s, self._since_bytes = self._progress_s, 0
        if rate < self._settings.min_bytes_per_s:
            return f"{rate:,.0f} bytes/s over {spent_s:.1f} s, below {self._settings.min_bytes_per_s:,.0f}"
        return ""
