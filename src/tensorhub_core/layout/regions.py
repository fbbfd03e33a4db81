"""Calculate with half-open boxes of integer coordinates; a box of rank 0 is one point, never empty."""

from __future__ import annotations

from operator import lt

Point = tuple[int, ...]
Region = tuple[Point, Point]
"""First corner, and the corner past the last."""


def is_empty(lo: Point, hi: Point) -> bool:
    """Tell whether the region has no point."""
    return not all(map(lt, lo, hi))  # a plan asks for millions of regions: no generator


def intersect(one: Region, other: Region) -> Region | None:
    """Return the common part, or None if there is none."""
    lo = tuple(map(max, one[0], other[0]))
    hi = tuple(map(min, one[1], other[1]))
    return None if is_empty(lo, hi) else (lo, hi)


def subtract(region: Region, part: Region) -> list[Region]:
    """Return disjoint regions that make up `region` without `part`, which lies inside it."""
    lo, hi = list(region[0]), list(region[1])
    rest: list[Region] = []
    for axis, (low, high) in enumerate(zip(*part, strict=True)):
        if lo[axis] < low:
            rest.append((tuple(lo), (*hi[:axis], low, *hi[axis + 1 :])))
            lo[axis] = low
        if high < hi[axis]:
            rest.append(((*lo[:axis], high, *lo[axis + 1 :]), tuple(hi)))
            hi[axis] = high
    return rest


def align(point: Point, rank: int, fill: int) -> Point:
    """Fit a point to `rank` axes at its last axes: put `fill` in front, or drop leading axes."""
    spare = rank - len(point)
    return (fill,) * spare + point if spare >= 0 else point[-spare:]


def c_strides(shape: Point) -> Point:
    """Return the strides, in elements, of a C-ordered array."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def is_contiguous(shape: Point, within: Point) -> bool:
    """Tell whether a box of this shape is one run of elements of a C-ordered array; both have the same rank."""
    partial = False
    for length, full in zip(reversed(shape), reversed(within), strict=True):
        if partial and length != 1:
            return False
        partial = partial or length != full
    return True
