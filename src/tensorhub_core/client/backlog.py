"""Keep what of a schedule is still to be posted, and what of it has landed; pure.

Reads go out in the order of the schedule, but for those that have to wait: others may go first. In a raw plan every
source may take the next one; elsewhere each read has its source. A read that is posted in parts stays with one source
until all of it has landed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator

import numpy as np

from tensorhub_core.client.transfers import Part, Schedule

Span = tuple[int, int, int]
"""Reads `begin..end` of the schedule, of which the first `offset` bytes are posted already."""


class Backlog:
    """The reads of one job that still have to be posted."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._todo: dict[int, list[tuple[int, int]]] = {source: [span] for source, span in _spans(schedule)}
        """By source, in a raw plan for all of them under 0: reads that nobody has begun, in order."""
        self._halves: dict[int, tuple[int, int]] = {}
        """By source: a read of which only the first bytes are posted, and how many."""
        self._missing: dict[int, int] = {}
        """Bytes that have not landed yet of reads that were posted in parts."""
        self._again: list[int] = []
        """Reads to be posted anew because they were wrong."""
        self.wrong: dict[int, list[int]] = {}
        """By read: the sources from which it was wrong, in order."""
        self.left_bytes = schedule.bytes_of(0, len(schedule))
        """Bytes of reads that no source has begun to post."""

    def __bool__(self) -> bool:
        return bool(self._todo or self._halves or self._again)

    def urgent(self, source: int, working: Collection[int]) -> Span | None:
        """Return what a source has to finish, or may post anew; `working` are the sources still asked for more."""
        half = self._halves.get(source)
        if half is not None:
            return half[0], half[0] + 1, half[1]
        for index in self._again:
            if source in self._takers(index, working):
                return index, index + 1, 0
        return None

    def fresh(self, source: int, least: int = 0) -> Iterator[tuple[int, int]]:
        """Return the reads `begin..end`, from read `least` on, that a source may begin, in order."""
        todo = self._todo.get(self._key(source), [])
        for begin, end in itertools.islice(todo, _place(todo, least), None):
            if end > least:
                yield max(begin, least), end

    def has_work_for(self, sources: Collection[int]) -> bool:
        """Tell whether one of these sources has something to post, now or later."""
        return bool(self._again or any(self._key(each) in self._todo or each in self._halves for each in sources))

    def is_half(self, source: int) -> bool:
        """Tell whether a source has to post the rest of a read first."""
        return source in self._halves

    def posted(self, source: int, part: Part) -> None:
        """Move on behind a part that a source has posted."""
        whole = self._schedule.bytes_of(part.begin, part.end)
        if not part.offset_bytes:
            self._take(part)
        if part.length_bytes == whole:
            return
        self._missing.setdefault(part.begin, whole)
        offset = part.offset_bytes + part.length_bytes
        if offset < whole:
            self._halves[source] = part.begin, offset
        else:
            self._halves.pop(source, None)

    def landed(self, part: Part) -> bool:
        """Note that a part has landed; returns whether its reads are complete now."""
        if part.begin not in self._missing:
            return True
        self._missing[part.begin] -= part.length_bytes
        if self._missing[part.begin]:
            return False
        del self._missing[part.begin]
        return True

    def give_back(self, source: int) -> None:
        """Let others have the read that a source has begun; nothing of it may be on its way."""
        half = self._halves.pop(source, None)
        if half is not None:
            del self._missing[half[0]]
            self._again.insert(0, half[0])
            self.left_bytes += self._schedule.bytes_of(half[0], half[0] + 1)

    def again(self, index: int, source: int, working: Collection[int]) -> bool:
        """Post a read anew that was wrong: once more, or once from every source; returns False if that is used up."""
        wrong = self.wrong.setdefault(index, [])
        wrong.append(source)
        if not self._takers(index, working):
            return False
        self._again.append(index)
        self.left_bytes += self._schedule.bytes_of(index, index + 1)
        return True

    def _takers(self, index: int, working: Collection[int]) -> Collection[int]:
        """Return the sources that may read a read again: those that were not wrong, else a single one once more."""
        wrong = self.wrong.get(index, [])
        if not self._schedule.raw:
            return [int(self._schedule.source[index])] if len(wrong) < 2 else []
        others = [source for source in working if source not in wrong]
        return others or (working if len(wrong) < 2 else [])

    def _take(self, part: Part) -> None:
        self.left_bytes -= self._schedule.bytes_of(part.begin, part.end)
        if part.begin in self._again:
            self._again.remove(part.begin)
            return
        key = self._key(int(self._schedule.source[part.begin]))
        todo = self._todo[key]
        place = _place(todo, part.begin)
        begin, end = todo[place]
        todo[place : place + 1] = [span for span in ((begin, part.begin), (part.end, end)) if span[0] < span[1]]
        if not todo:
            del self._todo[key]

    def _key(self, source: int) -> int:
        return 0 if self._schedule.raw else source


def _place(spans: list[tuple[int, int]], index: int) -> int:
    """Return the number of the last span that begins at an index or before, 0 if there is none."""
    return max(0, bisect_right(spans, index, key=lambda span: span[0]) - 1)


def _spans(schedule: Schedule) -> list[tuple[int, tuple[int, int]]]:
    """Return the reads `begin..end` of each source, which lie together."""
    if not len(schedule):
        return []
    if schedule.raw:
        return [(0, (0, len(schedule)))]
    begins = np.flatnonzero(np.diff(schedule.source, prepend=-1)).tolist()
    spans = zip(begins, [*begins[1:], len(schedule)], strict=True)
    return [(int(schedule.source[begin]), (begin, end)) for begin, end in spans]
