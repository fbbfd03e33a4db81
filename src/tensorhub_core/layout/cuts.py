"""Say which part of a segment is read when not all of it is needed, and check what a stranger says about that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.regions import Point, c_strides
from tensorhub_core.layout.segments import SegmentTable

MAX_CUTS = 1 << 16
"""Cuts in one pack; whoever has more packs them in parts."""
CUT_BYTES = 40

_NUMBERS = 5
_MAX_NUMBER = 1 << 62

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExactPolicy:
    """When a part of a segment is read instead of the whole of it.

    A part has at most `max_share` of the bytes of a segment of at least `min_segment_bytes`. It is one run of any
    length, or several of at least `min_run_bytes`; or shorter ones, if it is still below that share when each run
    counts as `min_run_bytes` more, which is about what a descriptor costs.
    """

    min_run_bytes: int = 2048
    max_share: float = 0.75
    min_segment_bytes: int = 16 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """List parts of segments of one layout, or of several; every array is i64 [cuts].

    Cut `i` is `count[i]` runs of `run_bytes[i]`, one every `stride_bytes[i]`; the first begins `offset_bytes[i]` behind
    the begin of segment `segment[i]`. The *bytes of a cut* are those of its runs, one behind the other: so they lie in
    staging memory, and of them the checksum of the cut is taken. A single run has `stride_bytes == run_bytes`.
    """

    segment: _Ints
    offset_bytes: _Ints
    run_bytes: _Ints
    stride_bytes: _Ints
    count: _Ints

    def __len__(self) -> int:
        return len(self.segment)

    @property
    def length_bytes(self) -> _Ints:
        """Return the bytes of each cut."""
        return self.run_bytes * self.count

    def take(self, which: NDArray[np.integer] | NDArray[np.bool_] | slice) -> Cuts:
        """Return some of the cuts."""
        columns = (self.segment, self.offset_bytes, self.run_bytes, self.stride_bytes, self.count)
        return Cuts(*(column[which] for column in columns))


def no_cuts() -> Cuts:
    """Return an empty list."""
    return Cuts(*(np.zeros(0, np.int64) for _ in range(_NUMBERS)))


def pack_cuts(cuts: Cuts) -> bytes:
    """Encode cuts as little-endian u64 [cuts, 5]: segment, offset, run, stride in bytes, count.

    Raises ValueError if there are more than MAX_CUTS.
    """
    if len(cuts) > MAX_CUTS:
        raise ValueError(f"{len(cuts):,} cuts are more than {MAX_CUTS:,}: pack them in parts")
    columns = (cuts.segment, cuts.offset_bytes, cuts.run_bytes, cuts.stride_bytes, cuts.count)
    return np.stack(columns, axis=1).astype("<u8").tobytes()


def unpack_cuts(data: bytes, table: SegmentTable) -> Cuts:
    """Decode cuts from anyone and check them against a layout's segments.

    Each cut lies inside its segment, its runs are apart from each other, and the cuts of one segment have together no
    more bytes than the segment has: to sum them costs no more than to sum the layout. Raises LayoutMismatch naming the
    first cut that is wrong.
    """
    if len(data) % CUT_BYTES or len(data) > MAX_CUTS * CUT_BYTES:
        raise LayoutMismatch(f"{len(data):,} bytes are not up to {MAX_CUTS:,} cuts of {CUT_BYTES} bytes")
    numbers = np.frombuffer(data, "<u8").reshape(-1, _NUMBERS)
    _refuse(np.any(numbers >= _MAX_NUMBER, axis=1), numbers, "has a number that is larger than any memory")
    columns = numbers.astype(np.int64).T
    segment, offset, run, stride, count = columns
    _refuse(segment >= len(table), numbers, f"is of a segment that does not exist: there are {len(table):,}")
    length = table.length_bytes[segment].astype(np.int64)
    _refuse((run < 1) | (count < 1), numbers, "is empty")
    outside = (offset >= length) | (run > length) | (offset + run > length)
    _refuse(outside, numbers, "does not begin inside its segment")
    _refuse(np.where(count > 1, stride <= run, stride != run), numbers, "has runs that are not apart")
    # Divided rather than multiplied: the product of numbers from outside need not fit.
    _refuse(count - 1 > (length - offset - run) // stride, numbers, "does not end inside its segment")
    _, which = np.unique(segment, return_inverse=True)
    taken = np.bincount(which, weights=run * count)[which] if len(segment) else length
    _refuse(taken > length, numbers, "is of a segment whose cuts have more bytes than it has")
    return Cuts(*(np.ascontiguousarray(column) for column in columns))


def _refuse(wrong: NDArray[np.bool_], numbers: NDArray[np.uint64], what: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        raise LayoutMismatch(f"cut {at}, {tuple(map(int, numbers[at]))} (segment, offset, run, stride, count), {what}")


Form = tuple[int, int, int, int]
"""Offset, run, stride and count of a cut, in elements or in bytes."""


def form_of_box(start: Point, length: Point, shape: Point) -> Form | None:
    """Return a non-empty box of a C-ordered array as runs, in elements; None if it needs more than two levels."""
    strides = c_strides(shape)
    offset = sum(at * stride for at, stride in zip(start, strides, strict=True))
    levels = [(size, stride) for size, stride in zip(length, strides, strict=True) if size > 1]
    run = 1
    while levels and levels[-1][1] == run:
        run *= levels.pop()[0]
    if not levels:
        return offset, run, run, 1
    count, stride = levels.pop()
    while levels and levels[-1][1] == count * stride:
        count *= levels.pop()[0]
    return None if levels else (offset, run, stride, count)


def box_of_form(form: Form, shape: Point) -> tuple[Point, Point]:
    """Return start and length of the box, in a C-ordered array of `shape`, whose runs are these, all in elements.

    The opposite of `form_of_box`; raises ValueError if the runs are not those of a box.
    """
    offset, run, stride, count = form
    strides = c_strides(shape)
    start = tuple(offset // step % size for step, size in zip(strides, shape, strict=True))
    length = [1] * len(shape)
    left = run
    for axis in reversed(range(len(shape))):
        if left == 1 and count > 1 and strides[axis] == stride:
            left, count = count, 1
        step = min(left, shape[axis])
        if step < 1 or left % step:
            break
        length[axis] = step
        left //= step
    end = all(at + size <= full for at, size, full in zip(start, length, shape, strict=True))
    if left > 1 or count > 1 or not end or form_of_box(start, tuple(length), shape) != form:
        raise ValueError(f"runs {form} are not a box of an array of shape {shape}")
    return start, tuple(length)
