"""Check the bytes of reads against their source's checksums, and copy staged ones to where they belong.

Threads of their own do it, beside the one that moves bytes: hashing large pieces gives up the interpreter lock. That
one does it too, whenever it would have to wait for bytes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.device import DeviceMemory
from tensorhub_core.client.reading import Destination, SourceAccess
from tensorhub_core.client.sums import host_sums
from tensorhub_core.client.transfers import Schedule
from tensorhub_core.errors import TransportError
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.read_plan import ReadPlan, shape_of_read
from tensorhub_core.layout.regions import Point
from tensorhub_core.layout.scatter import Scatter, cast_box, scatter_bytes, scatter_cast
from tensorhub_core.layout.segments import segment_box
from tensorhub_core.layout.types import Checksum
from tensorhub_core.limits import start_thread

SAMPLED_SHARE = 1 / 8
"""The share of segments that `verify = sampled` compares."""
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Landed:
    """Reads `begin..end` of the schedule that have arrived from a source; `slot` u8 [slot bytes] holds staged ones."""

    source: int
    begin: int
    end: int
    slot: NDArray[np.uint8] | None = None
    slot_number: int = -1


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of `landed`: `right` bool [reads] says which match their checksums and are in place."""

    landed: Landed
    right: NDArray[np.bool_]
    error: Exception | None = None


class Checker:
    """Check and place the reads of one job."""

    def __init__(
        self,
        plan: ReadPlan,
        schedule: Schedule,
        sources: Sequence[SourceAccess],
        destination: Destination,
        devices: DeviceMemory | None,
        chosen: NDArray[np.bool_] | None = None,
    ) -> None:
        """Prepare; raises TransportError if device memory is to be filled and there are no `devices` to work on it.

        `chosen` bool [reads of the schedule]: which reads are compared, None = all; the others are taken as they are.
        """
        self.chosen = chosen
        self._plan = plan
        self._schedule = schedule
        self._sources = sources
        self._destination = destination
        self._devices = devices
        self._sums = {source.layout.checksum: host_sums(source.layout.checksum) for source in sources}
        self._buffers = [buffer for buffer in destination.buffers if buffer is not None]
        self._expected: NDArray[np.uint64] = np.zeros(len(schedule), np.uint64)
        self.unknown: NDArray[np.bool_] = schedule.cut >= 0
        """Which reads of the schedule cannot be compared yet: their checksums are not known."""
        self._reads_of_cuts: list[NDArray[np.int64]] = []
        """By source: the read of the schedule of each of its cuts, -1 where there is none; i64 [cuts of the source].

        In a raw plan that of each segment."""
        index_of: NDArray[np.int64] = np.full(len(plan), -1, np.int64)
        index_of[schedule.read] = np.arange(len(schedule))
        for number, source in enumerate(sources):
            if plan.raw and source.known is not None:
                self.unknown |= schedule.segment >= source.known
            mine = (schedule.source == number) & ~self.unknown
            self._expected[mine] = source.sums[schedule.segment[mine]]
            asked = slice(None) if plan.raw else (plan.source == number) & (plan.cut >= 0)
            self._reads_of_cuts.append(index_of[asked])
        if chosen is not None:
            self.unknown &= chosen
        if devices is None and len(self._buffers) < len(destination.buffers):
            raise TransportError("memory that is not the CPU's can only be filled with something that works on it")

    def know(self, source: int, first: int, sums: NDArray[np.uint64]) -> None:
        """Take the checksums of some of a source's cuts, numbered from `first` on; the first word about each counts.

        A read must not be posted before this call has returned.
        """
        reads = self._reads_of_cuts[source][first : first + len(sums)]
        wanted = np.flatnonzero(reads >= 0)
        wanted = wanted[self.unknown[reads[wanted]]]
        self._expected[reads[wanted]] = sums[wanted]
        self.unknown[reads[wanted]] = False

    def check(self, landed: Landed) -> Checked:
        """Compare checksums, and scatter what is staged and right."""
        begin, end = landed.begin, landed.end
        compared = np.arange(begin, end) if self.chosen is None else begin + np.flatnonzero(self.chosen[begin:end])
        right = np.ones(end - begin, np.bool_)
        if len(compared):
            right[compared - begin] = self._digests(landed, compared) == self._expected[compared]
        if landed.slot is not None:
            for index in (begin + np.flatnonzero(right)).tolist():
                self._place(int(self._schedule.read[index]), self._staged(landed, index))
        return Checked(landed, right)

    def _digests(self, landed: Landed, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the checksums of some of the reads that have landed."""
        checksum = self._sources[landed.source].layout.checksum
        lengths = self._schedule.length_bytes[indices].tolist()
        if landed.slot is not None:
            base = landed.slot.ctypes.data
            places = [base + self._schedule.slot_offset(landed.begin, index) for index in indices.tolist()]
            return self._sums[checksum](places, lengths)
        reads = self._schedule.read[indices]
        storages = self._plan.storage[reads]
        addresses = (self._destination.addresses[storages] + self._plan.offset_bytes[reads]).tolist()
        if len(self._buffers) == len(self._destination.buffers):
            return self._sums[checksum](addresses, lengths)
        runs = zip(storages.tolist(), addresses, lengths, strict=True)
        return np.array([self._digest(checksum, *run) for run in runs], np.uint64)

    def _staged(self, landed: Landed, index: int) -> NDArray[np.uint8]:
        """Return the bytes of a read that lies in a staging slot."""
        assert landed.slot is not None
        at = self._schedule.slot_offset(landed.begin, index)
        return landed.slot[at : at + int(self._schedule.length_bytes[index])]

    def _digest(self, checksum: Checksum, storage: int, address: int, length: int) -> int:
        if self._destination.buffers[storage] is not None:
            return int(self._sums[checksum]([address], [length])[0])
        assert self._devices is not None
        return self._devices.checksum(checksum, self._destination.devices[storage], address, length)

    def _place(self, read: int, segment: NDArray[np.uint8]) -> None:
        """Copy a segment that has come through the host's memory to where it belongs."""
        plan, here = self._plan, self._destination
        if plan.direct[read]:  # staged only because it goes to a device
            assert self._devices is not None
            storage = int(plan.storage[read])
            address = int(here.addresses[storage]) + int(plan.offset_bytes[read])
            return self._devices.write(here.devices[storage], address, segment)
        source = self._sources[plan.source[read]]
        box = segment_box(source.layout, source.table, int(plan.segment[read]))
        dtype = source.layout.tensors[source.layout.storages[box.storage][0]].dtype
        shape = shape_of_read(plan, read, box.shape, dtype_bytes(dtype))
        for scatter in plan.scatters[read]:
            self._scatter(segment, shape, dtype, scatter)

    def _scatter(self, segment: NDArray[np.uint8], shape: Point, dtype: str, scatter: Scatter) -> None:
        """Copy a box out of a staged segment [shape]; numbers for a device are converted here too.

        A processor and a device would make different bits of a NaN, but all readers are to hold the same.
        """
        here = self._destination
        spec = here.layout.tensors[here.layout.storages[scatter.storage][0]]
        buffer = here.buffers[scatter.storage]
        if buffer is not None:
            if dtype == spec.dtype:
                scatter_bytes(segment, shape, scatter, buffer, spec.shape, dtype_bytes(dtype))
            else:
                scatter_cast(segment, shape, scatter, buffer, spec.shape, (dtype, spec.dtype))
            return
        assert self._devices is not None
        if dtype != spec.dtype:
            segment, scatter = cast_box(segment, shape, scatter, (dtype, spec.dtype))
            shape = scatter.shape
        place = here.devices[scatter.storage], int(here.addresses[scatter.storage])
        self._devices.scatter(segment, shape, scatter, *place, spec.shape, dtype_bytes(spec.dtype))


def choose_checks(policy: str, reads: int, chance: np.random.Generator) -> NDArray[np.bool_] | None:
    """Return which reads to compare, bool [reads], by the setting `verify`; None = all of them."""
    if policy == "always":
        return None
    chosen = chance.random(reads) < (SAMPLED_SHARE if policy == "sampled" else 0.0)
    if policy == "sampled" and reads:
        chosen[chance.integers(reads)] = True  # one at least
    return chosen


_Item = tuple[Checker, Landed, Callable[[Checked], None]]


class Verifier:
    """Threads that check what has landed, and the caller if it has time; results go to `deliver`, in any order."""

    def __init__(self, most_waiting: int, threads: int | None = None) -> None:
        """Start the threads (None = one less than the CPUs, 1 to 4); at most `most_waiting` items wait for them.

        Does with fewer where the system allows no more; raises TransportError if there is not even one.
        """
        if threads is None:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
            threads = max(1, min(_MOST_THREADS, cpus - 1))
        self._waiting: queue.Queue[_Item | None] = queue.Queue(most_waiting)
        self._kept: _Item | None = None
        """What came last: still in the CPU's cache, and checked soonest by whoever has moved it."""
        self._threads: list[threading.Thread] = []
        for number in range(threads):
            thread = threading.Thread(target=self._run, name=f"tensorhub-verifier-{number}", daemon=True)
            try:
                start_thread(thread)
            except TransportError:
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    def submit(self, checker: Checker, landed: Landed, deliver: Callable[[Checked], None]) -> None:
        """Have what landed checked: what came last when its thread `help`s, what came before it by the others.

        Waits while too many are waiting. Only the thread that moves bytes calls it.
        """
        kept, self._kept = self._kept, (checker, landed, deliver)
        if kept is not None:
            self._waiting.put(kept)

    def help(self) -> bool:
        """Check one of what waits, on the thread that moves bytes, while it has none to move; False if nothing waits.

        A source on the same machine needs a CPU to send; threads that verify would take it away where there are few.
        """
        item, self._kept = self._kept, None
        if item is None:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                return False
            assert item is not None  # `close` comes when nobody moves bytes any more
        _check(*item)
        return True

    def close(self, timeout_s: float) -> None:
        """End the threads after what waits for them."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            _check(*item)
            del item  # or the last job's memory would live until the next one


def _check(checker: Checker, landed: Landed, deliver: Callable[[Checked], None]) -> None:
    try:
        checked = checker.check(landed)
    except Exception as error:  # goes to the job, which ends with it
        checked = Checked(landed, np.zeros(landed.end - landed.begin, np.bool_), error)
    deliver(checked)
