"""Cut a read plan into bounded batches of runs, in plan order; pure, and vectorised for plans of 60,000 small reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.reading import Destination, SourceAccess
from tensorhub_core.layout.read_plan import ReadPlan

STAGED_ALIGN_BYTES = 64
"""Staged segments begin at multiples of this, so that scattering them reads aligned elements."""


@dataclass(frozen=True, slots=True)
class Part:
    """A batch to post: reads `begin..end` of the schedule, or one part of a single read.

    `offset_bytes` and `length_bytes` say which bytes of read `begin` when it is a part (then `end == begin + 1`).
    """

    begin: int
    end: int
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a batch, u64 [runs]; `local` counts from the staging slot's begin when the reads are staged."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    length_bytes: NDArray[np.uint64]


class Schedule:
    """The reads of a plan that are still to do, as arrays [reads to do], in plan order.

    `read` is the index in the plan; `source` and `segment` say what is read; `remote` where it lies; `local` where it
    goes when it is not `staged`; `group` changes where two neighbours cannot be in one batch.
    """

    def __init__(
        self, plan: ReadPlan, sources: Sequence[SourceAccess], destination: Destination, verified: NDArray[np.bool_]
    ) -> None:
        self.read: NDArray[np.int64] = np.flatnonzero(~verified)
        self.source = plan.source[self.read]
        self.segment = plan.segment[self.read]
        self.length_bytes: NDArray[np.int64] = plan.length_bytes[self.read].astype(np.int64)
        self.staged: NDArray[np.bool_] = ~plan.direct[self.read]
        storage = plan.storage[self.read]
        self.local: NDArray[np.uint64] = destination.addresses[storage] + plan.offset_bytes[self.read]
        names = sorted({"cpu", *destination.devices, *(name for source in sources for name in source.devices)})
        self.devices: tuple[str, ...] = tuple(names)
        here = _codes(destination.devices, names)[storage]
        self.local_device = np.where(self.staged, names.index("cpu"), here)
        self.remote: NDArray[np.uint64] = np.zeros(len(self.read), np.uint64)
        self.remote_device = np.zeros(len(self.read), np.int64)
        for number, source in enumerate(sources):
            mine = self.source == number
            at = self.segment[mine]
            there = source.table.storage[at]
            self.remote[mine] = source.addresses[there] + source.table.offset_bytes[at]
            self.remote_device[mine] = _codes(source.devices, names)[there]
        kind = np.stack([self.source, self.staged, self.local_device, self.remote_device])
        self.group: NDArray[np.int64] = np.zeros(len(self.read), np.int64)
        np.cumsum(np.any(kind[:, 1:] != kind[:, :-1], axis=0), out=self.group[1:])
        padded = -(-self.length_bytes // STAGED_ALIGN_BYTES) * STAGED_ALIGN_BYTES
        room = np.where(self.staged, padded, self.length_bytes)
        self._end: NDArray[np.int64] = np.cumsum(room)
        self._begin: NDArray[np.int64] = self._end - room

    def __len__(self) -> int:
        return len(self.read)

    @property
    def largest_staged_bytes(self) -> int:
        """Return the room that the largest staged read needs."""
        room = self._end - self._begin
        return int(room[self.staged].max(initial=0))

    def cut(self, begin: int, end: int, offset_bytes: int, most_bytes: int, most_runs: int) -> Part:
        """Return the next batch of reads `begin..end`, of which `offset_bytes` of the first are posted already."""
        length = int(self.length_bytes[begin])
        if offset_bytes or length > most_bytes:
            return Part(begin, begin + 1, offset_bytes, min(most_bytes, length - offset_bytes))
        # Not numpy's search: it gives up the interpreter lock and then waits for it, here once per batch.
        stop = bisect_right(self.group, self.group[begin], begin, end)
        stop = max(begin + 1, bisect_right(self._end, self._begin[begin] + most_bytes, begin, stop))
        starts = self._starts(begin, stop)
        if len(starts) > most_runs:
            stop = begin + int(starts[most_runs])
        return Part(begin, stop, 0, int(self.length_bytes[begin:stop].sum()))

    def runs(self, part: Part) -> Runs:
        """Return the runs of a batch; neighbours that touch on both sides are joined."""
        if part.end == part.begin + 1:
            local = self._local(part.begin, part.end) + np.uint64(part.offset_bytes)
            remote = self.remote[part.begin : part.end] + np.uint64(part.offset_bytes)
            return Runs(local, remote, np.array([part.length_bytes], np.uint64))
        starts = self._starts(part.begin, part.end)
        length = np.add.reduceat(self.length_bytes[part.begin : part.end], starts).astype(np.uint64)
        local = self._local(part.begin, part.end)[starts]
        return Runs(local, self.remote[part.begin : part.end][starts], length)

    def slot_offset(self, first: int, index: int) -> int:
        """Return where a staged read lies in the slot that begins with read `first`."""
        return int(self._begin[index] - self._begin[first])

    def _local(self, begin: int, end: int) -> NDArray[np.uint64]:
        local = self._begin[begin:end] - self._begin[begin] if self.staged[begin] else self.local[begin:end]
        return local.astype(np.uint64, copy=False)

    def _starts(self, begin: int, end: int) -> NDArray[np.intp]:
        """Return the indices, relative to `begin`, at which a run starts that the one before does not touch."""
        local, remote = self._local(begin, end), self.remote[begin:end]
        length = self.length_bytes[begin:end].astype(np.uint64)
        apart = (local[1:] != local[:-1] + length[:-1]) | (remote[1:] != remote[:-1] + length[:-1])
        return np.flatnonzero(np.concatenate(([True], apart)))


def _codes(devices: Sequence[str], names: Sequence[str]) -> NDArray[np.int64]:
    index = {name: number for number, name in enumerate(names)}
    return np.array([index[device] for device in devices], np.int64)
