"""The manifest of a copy that is derived from another layout, as it grows with what is verified (law L12)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.device import TorchMemory
from tensorhub_core.client.memory import FilledMemory
from tensorhub_core.client.reading import SourceAccess
from tensorhub_core.client.sums import host_sums
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable

MOST_AT_ONCE_BYTES = 32 << 20
"""What is summed in one turn: the thread that does it also hears the server."""


def complete_segments(plan: ReadPlan, table: SegmentTable) -> NDArray[np.int64]:
    """Return how many of a destination's first segments are complete when the first `r` reads are, i64 [reads + 1].

    A segment is complete when no read that is missing brings anything for it or for one before it: those reads are in
    the order of the first byte that each brings.
    """
    begins: NDArray[np.int64] = np.zeros(len(table) + 1, np.int64)
    np.cumsum(table.length_bytes.astype(np.int64), out=begins[1:])
    place = begins[table.first[plan.storage]] + plan.offset_bytes.astype(np.int64)
    found: NDArray[np.int64] = np.full(len(plan) + 1, len(table), np.int64)
    found[:-1] = np.searchsorted(begins, place, side="right") - 1
    return np.minimum.accumulate(found[::-1])[::-1]


class Progressive:
    """Checksums of the leading segments that a reader of another layout has filled. One thread at a time."""

    def __init__(self, memory: FilledMemory, plan: ReadPlan) -> None:
        self._memory = memory
        self._complete = complete_segments(plan, memory.table)
        self.sums: NDArray[np.uint64] = np.zeros(len(memory.table), np.uint64)
        self.count = 0
        """How many segments, from the first one on, are summed."""

    def replan(self, plan: ReadPlan) -> None:
        """Go on with another plan of the same reads: what is summed stays."""
        self._complete = complete_segments(plan, self._memory.table)

    def fill(self, reads: int, most_bytes: int | None = MOST_AT_ONCE_BYTES) -> None:
        """Sum what is complete since the last call, now that the first `reads` reads of the plan are verified."""
        end = int(self._complete[reads])
        if end <= self.count:
            return
        lengths = self._memory.table.length_bytes[self.count : end].astype(np.int64)
        if most_bytes is not None:
            fit = int(np.searchsorted(np.cumsum(lengths), most_bytes, side="right"))
            end = self.count + max(1, min(len(lengths), fit))
        self.sums[self.count : end] = sums_between(self._memory, self.count, end)
        self.count = end

    def finish(self) -> NDArray[np.uint64]:
        """Return the checksums of all segments, now that all reads are verified.

        Raises CorruptTransfer if something has changed since it was summed: what others have verified by that is not
        what the memory holds.
        """
        sums = self._memory.sums()
        changed = np.flatnonzero(sums[: self.count] != self.sums[: self.count])
        if len(changed):
            text = f"segment {int(changed[0])} of what was read has changed since it was verified"
            raise CorruptTransfer(f"{text}: the memory was written to before the call was over")
        return sums

    def packed(self, first: int, most: int) -> bytes:
        """Return the checksums from segment `first` on, at most so many, packed."""
        return self.sums[first : min(self.count, first + most)].astype("<u8").tobytes()


def sums_between(memory: FilledMemory, begin: int, end: int) -> NDArray[np.uint64]:
    """Return the checksums of segments `begin..end`, u64, of what the memory holds now."""
    table, checksum = memory.table, memory.layout.checksum
    storages, lengths = table.storage[begin:end], table.length_bytes[begin:end].tolist()
    addresses = (memory.addresses[storages] + table.offset_bytes[begin:end]).tolist()
    if all(memory.buffers[storage] is not None for storage in set(storages.tolist())):
        return host_sums(checksum)(addresses, lengths)
    sums, compute = np.zeros(end - begin, np.uint64), host_sums(checksum)
    edges = [0, *(1 + np.flatnonzero(np.diff(storages))).tolist(), end - begin]
    for first, last in pairwise(edges):
        storage, mine = int(storages[first]), slice(first, last)
        if memory.buffers[storage] is not None:
            sums[mine] = compute(addresses[mine], lengths[mine])
        else:
            runs = list(zip(addresses[mine], lengths[mine], strict=True))
            sums[mine] = TorchMemory().checksums(checksum, memory.devices[storage], runs)
    return sums


def right_by(
    access: SourceAccess, verified: NDArray[np.bool_], sums: NDArray[np.uint64] | None, own: Progressive | None
) -> NDArray[np.bool_] | None:
    """Return which of a reader's segments are right by the checksums of a source of its layout, bool [segments].

    `verified` are the reads of its plan so far: of segments with these `sums`, or (None) those that `own` derives from
    another layout. None: nothing is known of any.
    """
    known = np.arange(len(access.sums)) < (len(access.sums) if access.known is None else access.known)
    if sums is not None:
        return np.asarray(verified & known & (sums == access.sums), np.bool_)
    if own is None:
        return None
    own.fill(len(verified) if verified.all() else int(verified.argmin()), None)
    known[own.count :] = False
    return np.asarray(known & (own.sums == access.sums), np.bool_)


def with_sums(access: SourceAccess, known: bytes) -> SourceAccess:
    """Return a source without a manifest with what is known of its checksums by now; the same if that is no more."""
    count = len(known) // 8
    if access.known is None or not access.known < count <= len(access.sums):
        return access
    access.sums[access.known : count] = np.frombuffer(known, "<u8")[access.known :]
    return replace(access, known=count)
