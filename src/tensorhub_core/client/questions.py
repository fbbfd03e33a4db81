"""Decide what to ask sources about cuts, and when a source has been asked enough; pure.

The cuts of a source are asked for in batches, in the order in which they are read, a few at a time: checksums arrive
while reading goes on. Where the batches begin depends on the plan alone, so that all readers of one layout, and the
same reader at the next version, ask the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tensorhub_core.layout.cuts import Cuts
from tensorhub_core.state.bounds import MOST_CUTS

FIRST_BYTES = 8 << 20
BATCH_BYTES = 64 << 20
"""What the cuts of a batch have together: little in the first one, because reading waits for it."""
MOST_OPEN = 2
"""Batches of one source that are asked for at the same time."""
_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class CutBatch:
    """Cuts `first .. first + count` of a source, numbered as in `ReadPlan.cuts_of`."""

    source: int
    first: int
    count: int


def batches_of(source: int, cuts: Cuts) -> list[CutBatch]:
    """Return the batches of a source's cuts."""
    ends, found, first, room = np.cumsum(cuts.length_bytes), [], 0, FIRST_BYTES
    while first < len(cuts):
        before = int(ends[first - 1]) if first else 0
        after = max(first + 1, int(np.searchsorted(ends, before + room, "right")))
        after = min(after, first + MOST_CUTS)
        found.append(CutBatch(source, first, after - first))
        first, room = after, min(2 * room, BATCH_BYTES)
    return found


@dataclass(slots=True)
class _Source:
    waiting: deque[CutBatch]
    heard_s: float
    open: dict[int, CutBatch] = field(default_factory=dict)
    not_before_s: float = 0.0
    given_up: bool = False


class Questions:
    """What one read job has asked its sources; time is an argument."""

    def __init__(self, batches: list[list[CutBatch]], patience_s: float, now: float, first_number: int) -> None:
        """`batches` by source; questions are numbered from `first_number` on."""
        self._sources = [_Source(deque(each), now) for each in batches]
        self._patience_s = patience_s
        self.next_number = first_number

    def next(self, now: float) -> list[tuple[int, CutBatch]]:
        """Return what to ask now, numbered."""
        asked = []
        for source in self._sources:
            while source.waiting and len(source.open) < MOST_OPEN and now >= source.not_before_s:
                if source.given_up:
                    break
                batch = source.waiting.popleft()
                source.open[self.next_number] = batch
                asked.append((self.next_number, batch))
                self.next_number += 1
        return asked

    def given(self, number: int, now: float) -> CutBatch | None:
        """Take note of an answer; return what it was about, None if it is not expected any more."""
        for source in self._sources:
            batch = source.open.pop(number, None)
            if batch is not None:
                source.heard_s = now
                return batch
        return None

    def put_off(self, number: int, now: float) -> None:
        """Ask again in a moment: the source, or the way to it, could not answer now."""
        for source in self._sources:
            batch = source.open.pop(number, None)
            if batch is not None:
                source.waiting.appendleft(batch)
                source.not_before_s = now + _AGAIN_S

    def give_up(self, number: int) -> int | None:
        """Ask the source of a question nothing any more; return which that is."""
        for index, source in enumerate(self._sources):
            if number in source.open:
                source.given_up = True
                return index
        return None

    def ask_again(self, now: float) -> None:
        """Ask everything anew that is open: the connection over which it was asked is gone.

        So may be the word that a source was given up; and while the server was away none could answer.
        """
        for source in self._sources:
            source.waiting.extendleft(source.open[number] for number in sorted(source.open, reverse=True))
            source.open.clear()
            source.given_up, source.heard_s = False, now

    def overdue(self, now: float) -> tuple[int, float] | None:
        """Return a source that has answered nothing for too long, once, and for how long."""
        for index, source in enumerate(self._sources):
            silent_s = now - source.heard_s
            if (source.open or source.waiting) and not source.given_up and silent_s >= self._patience_s:
                source.given_up = True
                return index, silent_s
        return None
