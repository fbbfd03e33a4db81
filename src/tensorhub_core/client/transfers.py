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
    """The reads of a plan that are still to do, as arrays [reads to do], by source and then in plan order.

    `read` is the index in the plan; `segment` and `cut` say what is read; `source` from where, unless the plan is raw:
    then every source has every segment, and the reads are in plan order. `local` is where it goes when it is not
    `staged`.
    """

    def __init__(
        self,
        plan: ReadPlan,
        sources: Sequence[SourceAccess],
        destination: Destination,
        verified: NDArray[np.bool_],
        through_host: bool = False,
    ) -> None:
        """Lay out what is missing; `through_host`: what goes to a device's memory is staged in the host's."""
        self.raw = plan.raw
        self.read: NDArray[np.int64] = np.flatnonzero(~verified)
        if not plan.raw:
            self.read = self.read[np.argsort(plan.source[self.read], kind="stable")]
        self.source = plan.source[self.read]
        self.segment = plan.segment[self.read]
        self.cut = plan.cut[self.read]
        self._cuts = _cut_runs(plan, self.cut)
        self._cut_offset: NDArray[np.uint64] = np.zeros(len(self.read), np.uint64)
        self._cut_offset[self.cut >= 0] = plan.cuts.offset_bytes[self.cut[self.cut >= 0]].astype(np.uint64)
        self.length_bytes: NDArray[np.int64] = plan.length_bytes[self.read].astype(np.int64)
        self.staged: NDArray[np.bool_] = ~plan.direct[self.read]
        storage = plan.storage[self.read]
        if through_host and set(destination.devices) - {"cpu"}:
            self.staged |= np.array([device != "cpu" for device in destination.devices], np.bool_)[storage]
        self.local: NDArray[np.uint64] = destination.addresses[storage] + plan.offset_bytes[self.read]
        names = sorted({"cpu"}.union(destination.devices, *(source.devices for source in sources)))
        self.devices: tuple[str, ...] = tuple(names)
        here = _codes(destination.devices, names)[storage]
        self.local_device = np.where(self.staged, names.index("cpu"), here)
        padded = -(-self.length_bytes // STAGED_ALIGN_BYTES) * STAGED_ALIGN_BYTES
        room = np.where(self.staged, padded, self.length_bytes)
        end: NDArray[np.int64] = np.cumsum(room)
        self._begin: NDArray[np.int64] = end - room
        self._total: NDArray[np.int64] = np.concatenate(([0], np.cumsum(self.length_bytes)))
        # Lists too: bisect finds its place in them ten times as fast as numpy, which also gives up the interpreter
        # lock and then has to wait for it.
        self._end_list: list[int] = end.tolist()
        self._total_list: list[int] = self._total.tolist()
        ways = [self._way_to(sources, [number]) for number in range(len(sources))] if plan.raw else []
        self._ways: list[_Way] = ways or [self._way_to(sources, range(len(sources)))]

    def __len__(self) -> int:
        return len(self.read)

    @property
    def largest_staged_bytes(self) -> int:
        """Return the room that the largest staged read needs."""
        room = np.asarray(self._end_list, np.int64) - self._begin
        return int(room[self.staged].max(initial=0))

    def bytes_of(self, begin: int, end: int) -> int:
        """Return the length of reads `begin..end`."""
        return self._total_list[end] - self._total_list[begin]

    def next_part(self, source: int, begin: int, end: int, offset_bytes: int, most_bytes: int, most_runs: int) -> Part:
        """Return the next batch of reads `begin..end`, of which `offset_bytes` of the first are posted already."""
        length, cut = self.bytes_of(begin, begin + 1), self._cut_of(begin)
        if offset_bytes or length > most_bytes or (cut is not None and cut.count > most_runs):
            size = min(most_bytes, length - offset_bytes)
            return Part(
                begin, begin + 1, offset_bytes, size if cut is None else cut.bite(offset_bytes, size, most_runs)
            )
        way = self._way(source)
        stop = bisect_right(way.group, way.group[begin], begin, end)
        base = self._end_list[begin - 1] if begin else 0
        stop = bisect_right(self._end_list, base + most_bytes, begin, stop)
        before = way.runs[begin] - (1 if cut is None else cut.count)
        stop = max(begin + 1, bisect_right(way.runs, before + most_runs, begin, stop))
        return Part(begin, stop, 0, self.bytes_of(begin, stop))

    def runs(self, source: int, part: Part) -> Runs:
        """Return the runs of a batch; neighbours that touch on both sides are joined."""
        begin, end, way = part.begin, part.end, self._way(source)
        base = self._begin[begin] if self.staged[begin] else 0
        if end == begin + 1:
            local, remote = way.local[begin] - np.uint64(base), way.remote[begin]
            cut = self._cut_of(begin)
            if cut is not None:
                return cut.runs(local, remote, part)
            offset = np.uint64(part.offset_bytes)
            return Runs(*(np.array([each], np.uint64) for each in (local + offset, remote + offset, part.length_bytes)))
        edges = np.empty(way.number[end - 1] - way.number[begin] + 2, np.int64)
        edges[0], edges[-1] = begin, end
        edges[1:-1] = way.first[way.number[begin] + 1 : way.number[end - 1] + 1]
        total, starts = self._total[edges], edges[:-1]
        length = (total[1:] - total[:-1]).astype(np.uint64)
        return self._spread(Runs(way.local[starts] - np.uint64(base), way.remote[starts], length), starts)

    def _spread(self, runs: Runs, reads: NDArray[np.int64]) -> Runs:
        """Take apart the cuts among the runs, which begin with these reads."""
        if self._cuts is None or (count := self._cuts[2, reads]).max() == 1:
            return runs
        ends = np.cumsum(count)
        number = (np.arange(ends[-1]) - np.repeat(ends - count, count)).astype(np.uint64)
        run, stride = (np.repeat(each, count).astype(np.uint64) for each in self._cuts[:2, reads])
        local, remote, length = (np.repeat(each, count) for each in (runs.local, runs.remote, runs.length_bytes))
        whole = np.repeat(count, count) == 1
        return Runs(local + number * run, remote + number * stride, np.where(whole, length, run))

    def _cut_of(self, index: int) -> _CutRuns | None:
        """Return a read's runs if it has several."""
        if self._cuts is None or self._cuts[2, index] == 1:
            return None
        return _CutRuns(*self._cuts[:, index].tolist())

    def devices_of(self, source: int, begin: int) -> tuple[str, str]:
        """Return the devices, here and there, of a batch that begins with a read."""
        return self.devices[self.local_device[begin]], self.devices[self._way(source).remote_device[begin]]

    def slot_offset(self, first: int, index: int) -> int:
        """Return where a staged read lies in the slot that begins with read `first`."""
        return int(self._begin[index] - self._begin[first])

    def _way(self, source: int) -> _Way:
        return self._ways[source if self.raw else 0]

    def _way_to(self, sources: Sequence[SourceAccess], numbers: Sequence[int]) -> _Way:
        """Lay out the way to one source of a raw plan, or to all of another one."""
        remote: NDArray[np.uint64] = np.zeros(len(self.read), np.uint64)
        remote_device = np.zeros(len(self.read), np.int64)
        for number in numbers:
            source = sources[number]
            mine = slice(None) if self.raw else self.source == number
            at = self.segment[mine]
            there = source.table.storage[at]
            remote[mine] = source.addresses[there] + source.table.offset_bytes[at] + self._cut_offset[mine]
            remote_device[mine] = _codes(source.devices, self.devices)[there]
        kind = np.stack([self.source, self.staged, self.local_device, remote_device])
        other = np.any(kind[:, 1:] != kind[:, :-1], axis=0)
        local = np.where(self.staged, self._begin.astype(np.uint64), self.local)
        length = self.length_bytes.astype(np.uint64)
        apart = (local[1:] != local[:-1] + length[:-1]) | (remote[1:] != remote[:-1] + length[:-1]) | other
        count = np.ones(len(local), np.int64) if self._cuts is None else self._cuts[2]
        apart |= (count[1:] > 1) | (count[:-1] > 1)
        new = np.concatenate((np.ones(min(1, len(local)), np.bool_), apart))
        first = np.flatnonzero(new)
        group: NDArray[np.int64] = np.zeros(len(local), np.int64)
        np.cumsum(other, out=group[1:])
        number_of: NDArray[np.int64] = np.zeros(len(local), np.int64)
        np.cumsum(apart, out=number_of[1:])
        runs: list[int] = np.cumsum(np.where(new, count, 0)).tolist()
        return _Way(local, remote, remote_device, group.tolist(), first, number_of.tolist(), runs)


@dataclass(frozen=True, slots=True)
class _Way:
    """How reads come from a source: arrays and lists [reads], and `first` [joints], the read at which each one begins.

    A joint is one cut, or neighbours that are one run. `local` counts from the begin of the schedule where reads are
    staged; `remote` is where they lie; `group` changes where two neighbours cannot be in one batch; `number` is the
    joint of a read; `runs` counts the runs up to the end of its joint.
    """

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    remote_device: NDArray[np.int64]
    group: list[int]
    first: NDArray[np.intp]
    number: list[int]
    runs: list[int]


@dataclass(frozen=True, slots=True)
class _CutRuns:
    """The runs of one read that has several."""

    run_bytes: int
    stride_bytes: int
    count: int

    def bite(self, offset_bytes: int, size_bytes: int, most_runs: int) -> int:
        """Return how much of `size_bytes` from an offset on fits into so many runs; whole runs if it can be."""
        run = self.run_bytes
        end = min(offset_bytes + size_bytes, (offset_bytes // run + most_runs) * run)
        whole = end // run * run
        return (whole if whole > offset_bytes else end) - offset_bytes

    def runs(self, local: np.uint64, remote: np.uint64, part: Part) -> Runs:
        """Return the runs of a part of the read, whose first byte comes from `remote` and goes to `local`."""
        begin, end = part.offset_bytes, part.offset_bytes + part.length_bytes
        number = np.arange(begin // self.run_bytes, -(-end // self.run_bytes))
        starts = np.maximum(number * self.run_bytes, begin)
        length = np.minimum((number + 1) * self.run_bytes, end) - starts
        there = number * self.stride_bytes + starts - number * self.run_bytes
        return Runs(local + starts.astype(np.uint64), remote + there.astype(np.uint64), length.astype(np.uint64))


def _cut_runs(plan: ReadPlan, cut: NDArray[np.int32]) -> NDArray[np.int64] | None:
    """Return run, stride and count of reads with these cuts, i64 [3, reads]; None if there is no cut at all."""
    if not len(plan.cuts):
        return None
    columns = np.ones((3, len(cut)), np.int64)
    is_cut = cut >= 0
    columns[:, is_cut] = np.stack([plan.cuts.run_bytes, plan.cuts.stride_bytes, plan.cuts.count])[:, cut[is_cut]]
    return columns


def _codes(devices: Sequence[str], names: Sequence[str]) -> NDArray[np.int64]:
    index = {name: number for number, name in enumerate(names)}
    if len(set(devices)) == 1:  # nearly always; there may be tens of thousands
        return np.full(len(devices), index[devices[0]], np.int64)
    return np.array([index[device] for device in devices], np.int64)
