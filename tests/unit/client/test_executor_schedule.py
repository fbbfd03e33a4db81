"""Cutting plans into batches, compared with a slow and obvious way to do it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.client.reading import Destination, SourceAccess
from tensorhub_core.client.transfers import Part, Schedule
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable

LAYOUT = build_layout([], [], shard=0, num_shards=1)
LOCAL, REMOTE = 1_000_000, 5_000_000


def u64(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw a plan over two sources with adjacent and scattered reads, direct and staged, on two devices."""
    count = draw(st.integers(1, 30))
    lengths = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 7]), min_size=2 * count, max_size=2 * count))
    source = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), np.int32)
    direct = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    on_gpu = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    done = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_)
    ends = np.cumsum(lengths)
    local = LOCAL + ends - lengths + np.cumsum(gaps[:count])
    remote = REMOTE + ends - lengths + np.cumsum(gaps[count:])
    each = np.arange(count, dtype=np.int32)
    plan = ReadPlan(False, source, each, u64(lengths), direct, each, np.zeros(count, np.uint64), {}, int(ends[-1]))
    table = SegmentTable(each, np.zeros(count, np.uint64), u64(lengths), np.arange(count + 1))
    devices = tuple("cuda:0" if gpu else "cpu" for gpu in on_gpu)
    sources = [
        SourceAccess("l", "r", b"", LAYOUT, table, u64(list(remote)), ("cpu",) * count, u64([0] * count), count)
        for _ in range(2)
    ]
    destination = Destination(LAYOUT, table, u64(list(local)), devices, [None] * count)
    return Schedule(plan, sources, destination, done)


def cut_all(schedule: Schedule, most_bytes: int, most_runs: int) -> list[Part]:
    parts, at, offset = [], 0, 0
    while at < len(schedule):
        part = schedule.cut(at, len(schedule), offset, most_bytes, most_runs)
        parts.append(part)
        whole = int(schedule.length_bytes[part.begin : part.end].sum())
        offset = part.offset_bytes + part.length_bytes if part.length_bytes < whole else 0
        if not offset or offset == whole:
            at, offset = part.end, 0
    return parts


@settings(max_examples=300, deadline=None)
@given(schedules(), st.integers(1, 1000), st.integers(1, 8))
def test_batches_cover_everything_once_in_order_and_keep_their_bounds(
    schedule: Schedule, most_bytes: int, most_runs: int
) -> None:
    expected = []
    for index in range(len(schedule)):
        for byte in range(int(schedule.length_bytes[index])):
            place = None if schedule.staged[index] else int(schedule.local[index]) + byte
            expected.append((int(schedule.source[index]), place, int(schedule.remote[index]) + byte))
    found = []
    for part in cut_all(schedule, most_bytes, most_runs):
        runs = schedule.runs(part)
        kinds = {
            (schedule.source[at], schedule.staged[at], schedule.local_device[at], schedule.remote_device[at])
            for at in range(part.begin, part.end)
        }
        assert len(kinds) == 1, "a batch has one source and one device on each side"
        assert int(runs.length_bytes.sum()) == part.length_bytes <= most_bytes
        assert len(runs.length_bytes) <= most_runs
        staged = bool(schedule.staged[part.begin])
        for local, remote, length in zip(runs.local, runs.remote, runs.length_bytes, strict=True):
            for byte in range(int(length)):
                place = None if staged else int(local) + byte
                found.append((int(schedule.source[part.begin]), place, int(remote) + byte))
        if staged:
            check_slot(schedule, part)
    assert found == expected


def check_slot(schedule: Schedule, part: Part) -> None:
    """Check that staged reads of a batch do not overlap in their slot, and are where the verifier looks for them."""
    runs = schedule.runs(part)
    landed = {}
    for local, remote, length in zip(runs.local, runs.remote, runs.length_bytes, strict=True):
        for byte in range(int(length)):
            assert int(local) + byte not in landed
            landed[int(local) + byte] = int(remote) + byte
    for index in range(part.begin, part.end):
        offset = schedule.slot_offset(part.begin, index)
        length = part.length_bytes if part.end == part.begin + 1 else int(schedule.length_bytes[index])
        for byte in range(length):
            at = offset + part.offset_bytes + byte
            assert landed[at] == int(schedule.remote[index]) + part.offset_bytes + byte


def test_neighbours_are_one_run() -> None:
    count = 1000
    each = np.arange(count, dtype=np.int32)
    lengths = u64([64] * count)
    zeros = np.zeros(count, np.uint64)
    plan = ReadPlan(True, np.zeros(count, np.int32), each, lengths, np.ones(count, np.bool_), each, zeros, {}, 64_000)
    table = SegmentTable(each, zeros, lengths, np.arange(count + 1))
    addresses = u64([64 * at for at in range(count)])
    cpu = ("cpu",) * count
    source = SourceAccess("l", "r", b"", LAYOUT, table, addresses + np.uint64(REMOTE), cpu, zeros, count)
    destination = Destination(LAYOUT, table, addresses + np.uint64(LOCAL), cpu, [None] * count)
    schedule = Schedule(plan, [source], destination, np.zeros(count, np.bool_))
    part = schedule.cut(0, count, 0, 1 << 20, 256)
    assert part == Part(0, count, 0, 64_000)
    runs = schedule.runs(part)
    assert (runs.local.tolist(), runs.remote.tolist(), runs.length_bytes.tolist()) == ([LOCAL], [REMOTE], [64_000])


@pytest.mark.parametrize("count", [0, 1])
def test_plans_of_nothing_and_of_one_read(count: int) -> None:
    each = np.arange(count, dtype=np.int32)
    zeros = np.zeros(count, np.uint64)
    plan = ReadPlan(True, each, each, u64([5] * count), np.ones(count, np.bool_), each, zeros, {}, 5 * count)
    table = SegmentTable(each, zeros, u64([5] * count), np.arange(count + 1))
    source = SourceAccess("l", "r", b"", LAYOUT, table, zeros, ("cpu",) * count, zeros, count)
    destination = Destination(LAYOUT, table, zeros, ("cpu",) * count, [None] * count)
    schedule = Schedule(plan, [source], destination, np.zeros(count, np.bool_))
    assert len(schedule) == count
    assert schedule.largest_staged_bytes == 0
    assert [part.length_bytes for part in cut_all(schedule, 3, 1)] == [3, 2] * count
