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
from tensorhub_core.layout.cuts import Cuts, no_cuts
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
    cuts: Cuts

    def taker(self, index: int) -> int:
        return next(self.takers) if self.schedule.raw else int(self.schedule.source[index])

    def remote(self, source: int, index: int) -> int:
        """Return where the first byte of a read lies."""
        return self.places(source, index)[0]

    def places(self, source: int, index: int) -> list[int]:
        """Return where every byte of a read lies, in order."""
        base = int(self.sources[source].addresses[self.schedule.segment[index]])
        cut, cuts = int(self.schedule.cut[index]), self.cuts
        if cut < 0:
            return [base + byte for byte in range(int(self.schedule.length_bytes[index]))]
        base += int(cuts.offset_bytes[cut])
        starts = [base + number * int(cuts.stride_bytes[cut]) for number in range(int(cuts.count[cut]))]
        return [start + byte for start in starts for byte in range(int(cuts.run_bytes[cut]))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a plan over two sources with adjacent, scattered and cut reads, direct and staged, on two devices."""
    count = draw(st.integers(1, 30))
    raw = draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 7]), min_size=3 * count, max_size=3 * count))
    source = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int32) * (not raw)
    direct = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_) | raw
    on_gpu = draw(st.lists(st.booleans(), min_size=3 * count, max_size=3 * count))
    done = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    cut, cuts = draw(cut_reads(lengths, raw))
    ends = np.cumsum(lengths)
    local = LOCAL + ends - lengths + np.cumsum(gaps[:count])
    each = np.arange(count, dtype=np.int32)
    zeros = np.zeros(count, np.uint64)
    plan = plan_of(
        raw, source.astype(np.int32), each, u64(lengths), direct, each, zeros, {}, int(ends[-1]), cut=cut, cuts=cuts
    )
    table = SegmentTable(each, zeros, u64(lengths), np.arange(count + 1))
    devices = ["cuda:0" if gpu else "cpu" for gpu in on_gpu]
    sources = []
    for number in (1, 2):
        span = slice(number * count, (number + 1) * count)
        remote = number * REMOTE + ends - lengths + np.cumsum(gaps[span])
        there = tuple(devices[span]) if raw else ("cpu",) * count
        sources.append(SourceAccess("l", "r", b"", LAYOUT, table, u64(list(remote)), there, zeros, count))
    destination = Destination(LAYOUT, table, u64(list(local)), tuple(devices[:count]), [None] * count)
    takers = itertools.cycle(draw(st.permutations([0, 1, 0])))
    return Case(Schedule(plan, sources, destination, done), sources, takers, cuts)


@st.composite
def cut_reads(draw: st.DrawFn, lengths: list[int], raw: bool) -> tuple[np.ndarray, Cuts]:
    """Make some of the reads cuts, of one run or of several, and their lengths those of the cuts."""
    rows, cut = [], np.full(len(lengths), -1, np.int32)
    for read in range(len(lengths)):
        kind = draw(st.sampled_from(("whole", "one", "several"))) if not raw else "whole"
        if kind == "whole":
            continue
        count = draw(st.integers(2, 12)) if kind == "several" else 1
        run = max(1, lengths[read] // count)
        lengths[read] = run * count
        cut[read] = len(rows)
        rows.append((read, draw(st.sampled_from((0, 0, 5))), run, run + 9 * (count > 1), count))
    return cut, Cuts(*np.array(rows, np.int64).reshape(-1, 5).T)


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
            places = case.places(taker, index)
            for byte in bytes_in(schedule, part, index):
                place = None if staged else int(schedule.local[index]) + byte
                expected.append((place, places[byte]))
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
    """Count the bytes of a batch that do not follow on the one before, here and there; a run of several stays one."""
    schedule, count, last = case.schedule, 0, (-1, -1)
    for index in range(part.begin, part.end):
        places = case.places(taker, index)
        alone = int(schedule.cut[index]) >= 0 and case.cuts.count[schedule.cut[index]] > 1
        begin = schedule.slot_offset(part.begin, index) if schedule.staged[index] else int(schedule.local[index])
        for number, byte in enumerate(bytes_in(schedule, part, index)):
            here = begin + byte, places[byte]
            count += here != last or (alone and number == 0)
            last = here[0] + 1, here[1] + 1
        last = (-1, -1) if alone else last
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
        offset, places = case.schedule.slot_offset(part.begin, index), case.places(taker, index)
        for byte in bytes_in(case.schedule, part, index):
            assert landed[offset + byte] == places[byte]


def test_cuts_are_posted_in_whole_runs_where_they_can_be() -> None:
    each, zeros = np.zeros(1, np.int32), np.zeros(1, np.uint64)
    cuts = Cuts(*np.array([[0], [3], [100], [256], [5000]], np.int64))
    plan = plan_of(False, each, each, u64([500_000]), each == 0, each, zeros, {}, 500_000, cut=each, cuts=cuts)
    table = SegmentTable(each, zeros, u64([5000 * 256]), np.arange(2))
    source = SourceAccess("l", "r", b"", LAYOUT, table, u64([REMOTE]), ("cpu",), zeros, 1)
    destination = Destination(LAYOUT, table, u64([LOCAL]), ("cpu",), [None])
    schedule = Schedule(plan, [source], destination, np.zeros(1, np.bool_))
    parts = [part for _, part in cut_all(Case(schedule, [source], itertools.repeat(0), cuts), 60_050, 1024)]
    assert {part.length_bytes for part in parts[:-1]} == {60_000}
    parts = [part for _, part in cut_all(Case(schedule, [source], itertools.repeat(0), cuts), 1 << 20, 1024)]
    assert [part.length_bytes for part in parts] == [102_400] * 4 + [90_400]
    runs = schedule.runs(0, parts[1])
    assert runs.remote[:2].tolist() == [REMOTE + 3 + 1024 * 256, REMOTE + 3 + 1025 * 256]
    assert runs.local[:2].tolist() == [LOCAL + 102_400, LOCAL + 102_500]


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
    parts = cut_all(Case(schedule, [source], itertools.repeat(0), no_cuts()), 3, 1)
    assert [part.length_bytes for _, part in parts] == [3, 2] * count
