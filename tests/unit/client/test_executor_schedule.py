"""Cutting plans into batches, compared with a slow and obvious way to do it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.client.reading import Destination, SourceAccess
from tensorhub_core.client.transfers import Part, Schedule
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.segments import SegmentTable
from tests.unit.client.reading_world import plan_of

LAYOUT = build_layout([], [], shard=0, num_shards=1)
LOCAL, REMOTE = 1_000_000, 5_000_000


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


@dataclass
class Case:
    """A schedule, and from where each of its batches is taken: the plan's source, or any if the plan is raw."""

    schedule: Schedule
    sources: list[SourceAccess]
    takers: Iterator[int]

    def taker(self, index: int) -> int:
        return next(self.takers) if self.schedule.raw else int(self.schedule.source[index])

    def remote(self, source: int, index: int) -> int:
        return int(self.sources[source].addresses[self.schedule.segment[index]])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a plan over two sources with adjacent and scattered reads, direct and staged, on two devices."""
    count = draw(st.integers(1, 30))
    raw = draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 7]), min_size=3 * count, max_size=3 * count))
    source = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int32) * (not raw)
    direct = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_) | raw
    on_gpu = draw(st.lists(st.booleans(), min_size=3 * count, max_size=3 * count))
    done = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    ends = np.cumsum(lengths)
    local = LOCAL + ends - lengths + np.cumsum(gaps[:count])
    each = np.arange(count, dtype=np.int32)
    zeros = np.zeros(count, np.uint64)
    plan = plan_of(raw, source.astype(np.int32), each, u64(lengths), direct, each, zeros, {}, int(ends[-1]))
    table = SegmentTable(each, zeros, u64(lengths), np.arange(count + 1))
    devices = ["cuda:0" if gpu else "cpu" for gpu in on_gpu]
    sources = []
    for number in (1, 2):
        span = slice(number * count, (number + 1) * count)
        remote = number * REMOTE + ends - lengths + np.cumsum(gaps[span])
        there = tuple(devices[span]) if raw else ("cpu",) * count
        sources.append(SourceAccess("l", "r", b"", LAYOUT, table, u64(list(remote)), there, zeros, count))
    destination = Destination(LAYOUT, table, u64(list(local)), tuple(devices[:count]), [None] * count)
    return Case(Schedule(plan, sources, destination, done), sources, itertools.cycle(draw(st.permutations([0, 1, 0]))))


def cut_all(case: Case, most_bytes: int, most_runs: int) -> list[tuple[int, Part]]:
    parts, at, offset, taker, schedule = [], 0, 0, 0, case.schedule
    while at < len(schedule):
        taker = taker if offset else case.taker(at)
        part = schedule.next_part(taker, at, len(schedule), offset, most_bytes, most_runs)
        parts.append((taker, part))
        whole = int(schedule.length_bytes[part.begin : part.end].sum())
        offset = part.offset_bytes + part.length_bytes if part.length_bytes < whole else 0
        if not offset or offset == whole:
            at, offset = part.end, 0
    return parts


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(1, 200), st.integers(1, 8))
def test_batches_cover_everything_once_in_order_and_keep_their_bounds(
    case: Case, most_bytes: int, most_runs: int
) -> None:
    schedule = case.schedule
    found, expected = [], []
    for taker, part in cut_all(case, most_bytes, most_runs):
        runs = schedule.runs(taker, part)
        kinds = {
            (schedule.source[at], schedule.staged[at], *schedule.devices_of(taker, at))
            for at in range(part.begin, part.end)
        }
        assert len(kinds) == 1, "a batch has one source and one device on each side"
        assert int(runs.length_bytes.sum()) == part.length_bytes == whole_bytes(schedule, part) <= most_bytes
        assert len(runs.length_bytes) <= most_runs
        assert len(runs.length_bytes) == fewest_runs(case, taker, part)
        staged = bool(schedule.staged[part.begin])
        for local, remote, length in zip(runs.local, runs.remote, runs.length_bytes, strict=True):
            found += [(None if staged else int(local) + byte, int(remote) + byte) for byte in range(int(length))]
        for index in range(part.begin, part.end):
            for byte in bytes_in(schedule, part, index):
                place = None if staged else int(schedule.local[index]) + byte
                expected.append((place, case.remote(taker, index) + byte))
        if staged:
            check_slot(case, taker, part)
    assert found == expected
    assert len(found) == int(schedule.length_bytes.sum())


def bytes_in(schedule: Schedule, part: Part, index: int) -> range:
    """Return which bytes of a read are in a batch."""
    if part.end == part.begin + 1:
        return range(part.offset_bytes, part.offset_bytes + part.length_bytes)
    return range(int(schedule.length_bytes[index]))


def whole_bytes(schedule: Schedule, part: Part) -> int:
    return sum(len(bytes_in(schedule, part, index)) for index in range(part.begin, part.end))


def fewest_runs(case: Case, taker: int, part: Part) -> int:
    """Count the reads of a batch that do not begin where the one before ends, here and there."""
    schedule, count = case.schedule, 1
    for index in range(part.begin + 1, part.end):
        length = int(schedule.length_bytes[index - 1])
        here = [schedule.slot_offset(part.begin, at) for at in (index - 1, index)]
        if not schedule.staged[index]:
            here = [int(schedule.local[at]) for at in (index - 1, index)]
        there = [case.remote(taker, at) for at in (index - 1, index)]
        count += here[0] + length != here[1] or there[0] + length != there[1]
    return count


def check_slot(case: Case, taker: int, part: Part) -> None:
    """Check that staged reads of a batch do not overlap in their slot, and are where the verifier looks for them."""
    runs = case.schedule.runs(taker, part)
    landed = {}
    for local, remote, length in zip(runs.local, runs.remote, runs.length_bytes, strict=True):
        for byte in range(int(length)):
            assert int(local) + byte not in landed
            landed[int(local) + byte] = int(remote) + byte
    for index in range(part.begin, part.end):
        offset = case.schedule.slot_offset(part.begin, index)
        for byte in bytes_in(case.schedule, part, index):
            assert landed[offset + byte] == case.remote(taker, index) + byte


def test_neighbours_are_one_run() -> None:
    count = 1000
    each = np.arange(count, dtype=np.int32)
    lengths = u64([64] * count)
    zeros = np.zeros(count, np.uint64)
    plan = plan_of(True, np.zeros(count, np.int32), each, lengths, np.ones(count, np.bool_), each, zeros, {}, 64_000)
    table = SegmentTable(each, zeros, lengths, np.arange(count + 1))
    addresses = u64([64 * at for at in range(count)])
    cpu = ("cpu",) * count
    source = SourceAccess("l", "r", b"", LAYOUT, table, addresses + np.uint64(REMOTE), cpu, zeros, count)
    destination = Destination(LAYOUT, table, addresses + np.uint64(LOCAL), cpu, [None] * count)
    schedule = Schedule(plan, [source], destination, np.zeros(count, np.bool_))
    part = schedule.next_part(0, 0, count, 0, 1 << 20, 256)
    assert part == Part(0, count, 0, 64_000)
    runs = schedule.runs(0, part)
    assert (runs.local.tolist(), runs.remote.tolist(), runs.length_bytes.tolist()) == ([LOCAL], [REMOTE], [64_000])


@pytest.mark.parametrize("count", [0, 1])
def test_plans_of_nothing_and_of_one_read(count: int) -> None:
    each = np.arange(count, dtype=np.int32)
    zeros = np.zeros(count, np.uint64)
    plan = plan_of(True, each, each, u64([5] * count), np.ones(count, np.bool_), each, zeros, {}, 5 * count)
    table = SegmentTable(each, zeros, u64([5] * count), np.arange(count + 1))
    source = SourceAccess("l", "r", b"", LAYOUT, table, zeros, ("cpu",) * count, zeros, count)
    destination = Destination(LAYOUT, table, zeros, ("cpu",) * count, [None] * count)
    schedule = Schedule(plan, [source], destination, np.zeros(count, np.bool_))
    assert len(schedule) == count
    assert schedule.largest_staged_bytes == 0
    parts = cut_all(Case(schedule, [source], itertools.repeat(0)), 3, 1)
    assert [part.length_bytes for _, part in parts] == [3, 2] * count
