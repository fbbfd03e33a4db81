"""Cuts against numpy: boxes become runs and come back, packs survive the way, and what a stranger sends is checked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.client.sums import cut_sums
from tensorhub_core.client.weighted import weighted_sum
from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout import cuts as module
from tensorhub_core.layout.cuts import Cuts, box_of_form, form_of_box, no_cuts, pack_cuts, unpack_cuts
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Checksum

Numbers = tuple[int, int, int, int, int]


def table_of(lengths: list[int]) -> SegmentTable:
    """Make a table of one storage with segments of the given lengths."""
    ends = np.cumsum(lengths)
    return SegmentTable(
        np.zeros(len(lengths), np.int32),
        (ends - lengths).astype(np.uint64),
        np.array(lengths, np.uint64),
        np.array([0, len(lengths)]),
    )


def cuts_of(numbers: list[Numbers]) -> Cuts:
    return Cuts(*np.array(numbers, np.int64).reshape(-1, 5).T)


def pack(numbers: list[Numbers]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for cut in numbers for number in cut)


def positions(cut: Numbers) -> list[int]:
    """Return the bytes of a cut, as positions in its segment, in their order."""
    _, offset, run, stride, count = cut
    return [offset + at * stride + byte for at in range(count) for byte in range(run)]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Draw a non-empty box: start, length, shape."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    length = tuple(draw(st.integers(1, size - at)) for at, size in zip(start, shape, strict=True))
    return start, length, shape


@settings(max_examples=500, deadline=None)
@given(boxes())
def test_boxes_become_runs_exactly_if_two_levels_are_enough(box: tuple[tuple[int, ...], ...]) -> None:
    start, length, shape = box
    numbers = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    where = tuple(slice(at, at + size) for at, size in zip(start, length, strict=True))
    wanted = numbers[where].reshape(-1)
    form = form_of_box(start, length, shape)
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
    steps = {int(b[0] - a[0]) for a, b in itertools.pairwise(runs)}
    assert (form is not None) == (len(steps) <= 1)
    if form is not None:
        offset, run, stride, count = form
        assert [offset + at * stride + each for at in range(count) for each in range(run)] == wanted.tolist()
        assert (count > 1) == (len(runs) > 1)
        assert stride > run if count > 1 else stride == run
        again = box_of_form(form, shape)
        assert again == (start, length)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.tuples(*[st.integers(0, 30)] * 4))
def test_runs_that_are_no_box_are_refused(shape: list[int], form: tuple[int, int, int, int]) -> None:
    try:
        box = box_of_form(form, tuple(shape))
    except ValueError:
        return
    assert form_of_box(*box, tuple(shape)) == form


def is_right(cut: Numbers, lengths: list[int]) -> bool:
    """Tell, byte by byte, whether a cut is one of these segments."""
    segment, _, run, stride, count = cut
    if segment >= len(lengths) or not run or not count:
        return False
    apart = stride > run if count > 1 else stride == run
    return apart and max(positions(cut)) < lengths[segment]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.lists(st.tuples(*[st.integers(0, 9)] * 5), max_size=4))
def test_a_pack_is_taken_exactly_if_every_cut_lies_in_its_segment(lengths: list[int], numbers: list[Numbers]) -> None:
    taken = [sum(cut[2] * cut[4] for cut in numbers if cut[0] == segment) for segment in range(len(lengths))]
    right = all(is_right(cut, lengths) for cut in numbers)
    if not right or any(bytes_ > length for bytes_, length in zip(taken, lengths, strict=True)):
        with pytest.raises(LayoutMismatch, match="cut "):
            unpack_cuts(pack(numbers), table_of(lengths))
        return
    cuts = unpack_cuts(pack(numbers), table_of(lengths))
    assert [tuple(map(int, cut)) for cut in zip(*columns(cuts), strict=True)] == numbers
    assert pack_cuts(cuts) == pack(numbers)
    assert cuts.length_bytes.tolist() == [len(positions(cut)) for cut in numbers]


def columns(cuts: Cuts) -> tuple[np.ndarray, ...]:
    return cuts.segment, cuts.offset_bytes, cuts.run_bytes, cuts.stride_bytes, cuts.count


HUGE = (1 << 64) - 1


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("value", [HUGE, 1 << 63, (1 << 63) - 1, 1 << 62, (1 << 62) - 1, 1 << 61, 1 << 32, 1 << 31])
def test_huge_numbers_are_refused_whatever_they_would_wrap_to(place: int, value: int) -> None:
    numbers = [0, 8, 8, 16, 4]
    numbers[place] = value
    with pytest.raises(LayoutMismatch, match="cut 1"):
        unpack_cuts(pack([(0, 0, 1, 1, 1), tuple(numbers)]), table_of([100]))  # type: ignore[list-item]
    both = [0, (1 << 62) - 1, (1 << 62) - 1, (1 << 62) - 1, (1 << 62) - 1]
    with pytest.raises(LayoutMismatch, match="cut 0"):
        unpack_cuts(pack([tuple(both)]), table_of([1 << 30]))  # type: ignore[list-item]


@pytest.mark.parametrize("length", [1, 39, 41, 79])
def test_packs_of_odd_lengths_are_refused(length: int) -> None:
    with pytest.raises(LayoutMismatch, match="bytes"):
        unpack_cuts(bytes(length), table_of([100]))


def test_packs_are_bounded_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CUTS", 3)
    numbers: list[Numbers] = [(0, at, 1, 1, 1) for at in range(4)]
    with pytest.raises(ValueError, match="parts"):
        pack_cuts(cuts_of(numbers))
    with pytest.raises(LayoutMismatch, match="bytes"):
        unpack_cuts(pack(numbers), table_of([100]))
    assert len(unpack_cuts(pack(numbers[:3]), table_of([100]))) == 3


@pytest.mark.parametrize("lengths", [[], [10]])
def test_nothing_is_a_pack_too(lengths: list[int]) -> None:
    assert pack_cuts(no_cuts()) == b""
    assert len(unpack_cuts(b"", table_of(lengths))) == 0


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(("xxh3", "weighted")))
def test_the_sum_of_a_cut_is_that_of_its_bytes_in_one_run(data: st.DataObject, checksum: Checksum) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4))
    table = table_of(lengths)
    memory = np.random.default_rng(len(lengths)).integers(0, 256, sum(lengths), np.uint8)
    numbers = []
    for _ in range(data.draw(st.integers(0, 6))):
        segment = data.draw(st.integers(0, len(lengths) - 1))
        offset = data.draw(st.integers(0, lengths[segment] - 1))
        run = data.draw(st.integers(1, lengths[segment] - offset))
        stride = run + data.draw(st.integers(1, 50))
        count = data.draw(st.integers(1, 1 + (lengths[segment] - offset - run) // stride))
        numbers.append((segment, offset, run, stride if count > 1 else run, count))
    address = np.array([memory.ctypes.data], np.uint64)
    sums = cut_sums(cuts_of(numbers), table, address, checksum)
    digest = xxhash.xxh3_64_intdigest if checksum == "xxh3" else weighted_sum
    for cut, found in zip(numbers, sums.tolist(), strict=True):
        begin = int(table.offset_bytes[cut[0]])
        assert found == digest(memory[begin + np.array(positions(cut))].tobytes())
