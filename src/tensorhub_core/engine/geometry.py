"""Turn strided copies between two tensors into boxes of both: what an engine's own weight loading does, as a layout.

Pure integer arithmetic on (offset, sizes, strides) in elements; no torch. A copy that is not a set of boxes is refused
by `NotABox` with the reason, never approximated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_PIECES = 8192
"""Upper bound of boxes that one copy may fall into; above it the copy counts as not expressible."""


class NotABox(ValueError):
    """The strided view is not made of boxes of its base tensor; the text says why."""


class _AcrossRows(NotABox):
    """The axes as they are run across the rows of a base: walk the outermost one step by step."""


@dataclass(frozen=True, slots=True)
class Strided:
    """A strided view: `offset` from the storage's first element, `sizes` and `strides` [axes]."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)


def contiguous(shape: Sequence[int], offset: int = 0) -> Strided:
    """Return the C-ordered view of a whole storage of this shape."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return Strided(offset, tuple(shape), tuple(strides))


@dataclass(frozen=True, slots=True)
class Piece:
    """One box: `source[source_start : + sizes]` is at `dest[dest_start : + sizes]`.

    `axes` lists (source axis, dest axis, size) of every axis longer than 1; all other sizes are 1.
    """

    source_start: tuple[int, ...]
    dest_start: tuple[int, ...]
    axes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Joint:
    """One axis that both views walk together: `size` steps of `source` and `dest` elements."""

    size: int
    source: int
    dest: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """An axis that begins or ends inside a row of a base: cut it after `steps` steps into two copies."""

    axis: _Joint
    steps: int

    def halves(self, source_at: int, dest_at: int, axes: Sequence[_Joint]) -> list[tuple[int, int, list[_Joint]]]:
        rest = [other for other in axes if other is not self.axis]
        size, source, dest = self.axis.size, self.axis.source, self.axis.dest
        first = (source_at, dest_at, [*rest, _Joint(self.steps, source, dest)])
        to = (source_at + self.steps * source, dest_at + self.steps * dest)
        return [first, (*to, [*rest, _Joint(size - self.steps, source, dest)])]


def pieces(source_base: Strided, source: Strided, dest_base: Strided, dest: Strided) -> list[Piece]:
    """Express the copy of view `source` (of `source_base`) into view `dest` (of `dest_base`) as boxes of both bases.

    Views have equal sizes. Bases do not overlap themselves. Raises NotABox with the reason.
    """
    if source.sizes != dest.sizes:
        raise NotABox(f"a copy of {source.sizes} into {dest.sizes} broadcasts")
    if source.numel == 0:
        return []
    found: list[Piece] = []
    left = [(source.offset, dest.offset, _joint_axes(source, dest))]
    while left:
        source_at, dest_at, axes = left.pop()
        try:
            inside = _split(source_base, source_at, dest_base, dest_at, axes)
            if isinstance(inside, _Cut):
                left += inside.halves(source_at, dest_at, axes)
            else:
                found += _count(source_base, source_at, dest_base, dest_at, inside)
        except _AcrossRows:
            outer, *rest = sorted(axes, key=lambda axis: -axis.dest)
            left += [(source_at + k * outer.source, dest_at + k * outer.dest, rest) for k in range(outer.size)]
        if len(found) + len(left) > MAX_PIECES:
            raise NotABox(f"the copy falls into more than {MAX_PIECES} boxes")
    return found


def _count(
    source_base: Strided, source_at: int, dest_base: Strided, dest_at: int, axes: Sequence[_Joint]
) -> list[Piece]:
    """Return the boxes of axes that each lie in one axis of both bases."""
    kept, counted = _choose(source_base, dest_base, axes)
    if math.prod(axis.size for axis in counted) > MAX_PIECES:
        raise NotABox(f"the copy falls into more than {MAX_PIECES} boxes")
    found = []
    for steps in itertools.product(*(range(axis.size) for axis in counted)):
        source_to = source_at + sum(k * axis.source for k, axis in zip(steps, counted, strict=True))
        dest_to = dest_at + sum(k * axis.dest for k, axis in zip(steps, counted, strict=True))
        source_start, dest_start = coordinates(source_base, source_to), coordinates(dest_base, dest_to)
        for a, b, size in kept:
            if source_start[a] + size > source_base.sizes[a] or dest_start[b] + size > dest_base.sizes[b]:
                raise _AcrossRows("the copy runs over the end of a row into the next one")
        found.append(Piece(source_start, dest_start, kept))
    return found


def region(base: Strided, view: Strided) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Express a view as boxes (start, shape) of its base; raises NotABox with the reason."""
    found = []
    for piece in pieces(base, view, base, view):
        shape = [1] * len(base.sizes)
        for axis, _, size in piece.axes:
            shape[axis] = size
        found.append((piece.source_start, tuple(shape)))
    return found


def coordinates(base: Strided, at: int) -> tuple[int, ...]:
    """Return the index of the storage element `at` in its base; raises NotABox if it lies outside."""
    left = at - base.offset
    index = [0] * len(base.sizes)
    for axis in sorted(range(len(base.sizes)), key=lambda axis: -base.strides[axis]):
        if base.sizes[axis] > 1:
            index[axis], left = divmod(left, base.strides[axis])
    if left != 0 or any(not 0 <= i < size for i, size in zip(index, base.sizes, strict=True)):
        raise NotABox("the view leaves the tensor")
    return tuple(index)


def through(piece: Piece, origin: Strided, dest_base: Strided) -> tuple[Strided, Strided]:
    """Follow a piece of a fresh copy back to what was copied: return its views of the origin's and the dest's storage.

    The piece's source is a C-ordered copy of the view `origin`, axis by axis.
    """
    sizes = tuple(size for _, _, size in piece.axes)
    at = origin.offset + sum(i * stride for i, stride in zip(piece.source_start, origin.strides, strict=True))
    to = dest_base.offset + sum(i * stride for i, stride in zip(piece.dest_start, dest_base.strides, strict=True))
    source = Strided(at, sizes, tuple(origin.strides[a] for a, _, _ in piece.axes))
    return source, Strided(to, sizes, tuple(dest_base.strides[b] for _, b, _ in piece.axes))


def subtract(
    start: tuple[int, ...], shape: tuple[int, ...], taken: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes (start, shape) of a box that no box of `taken` touches."""
    left = [(start, shape)]
    for other_start, other_shape in taken:
        left = [rest for box in left for rest in _minus(box, (other_start, other_shape))]
    yield from left


def overlap(
    one: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the common box (start, shape) of two boxes, or None."""
    start = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))
    shape = tuple(end - at for at, end in zip(start, ends, strict=True))
    return (start, shape) if all(size > 0 for size in shape) else None


def _minus(
    box: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[tuple[int, ...], tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    common = overlap(box, other)
    if common is None:
        yield box
        return
    start, shape = list(box[0]), list(box[1])
    for axis, (at, size) in enumerate(zip(*common, strict=True)):
        if at > start[axis]:
            yield tuple(start), (*shape[:axis], at - start[axis], *shape[axis + 1 :])
        if (end := start[axis] + shape[axis]) > at + size:
            yield (*start[:axis], at + size, *start[axis + 1 :]), (*shape[:axis], end - at - size, *shape[axis + 1 :])
        start[axis], shape[axis] = at, size


def _joint_axes(source: Strided, dest: Strided) -> list[_Joint]:
    """Return the axes longer than 1, adjacent ones merged where both views walk them in one line."""
    axes = [_Joint(*axis) for axis in zip(source.sizes, source.strides, dest.strides, strict=True) if axis[0] > 1]
    if any(axis.source == 0 or axis.dest == 0 for axis in axes):
        raise NotABox("the copy broadcasts an axis")
    merged: list[_Joint] = []
    for axis in sorted(axes, key=lambda axis: -axis.dest):
        if merged and merged[-1].source == axis.size * axis.source and merged[-1].dest == axis.size * axis.dest:
            axis = _Joint(merged.pop().size * axis.size, axis.source, axis.dest)
        merged.append(axis)
    return merged


def _split(
    source_base: Strided, source_at: int, dest_base: Strided, dest_at: int, axes: Sequence[_Joint]
) -> list[_Joint] | _Cut:
    """Split axes so that each lies in one axis of both bases, or say where to cut."""
    source_start, dest_start = coordinates(source_base, source_at), coordinates(dest_base, dest_at)
    done: list[_Joint] = []
    for whole in axes:
        axis, inner = whole, 1
        while axis.size > 1:
            room = min(
                _room(source_base, source_start, axis.size, axis.source),
                _room(dest_base, dest_start, axis.size, axis.dest),
            )
            if room == axis.size:
                done.append(axis)
                break
            row = min(_room(source_base, None, axis.size, axis.source), _room(dest_base, None, axis.size, axis.dest))
            if row < 2:
                raise _AcrossRows("the copy steps across the rows of a tensor")
            if room < row or axis.size % row:
                return _Cut(whole, (room if room < row else axis.size // row * row) * inner)
            done.append(_Joint(row, axis.source, axis.dest))
            axis, inner = _Joint(axis.size // row, axis.source * row, axis.dest * row), inner * row
    return done


def _room(base: Strided, start: tuple[int, ...] | None, size: int, stride: int) -> int:
    """Return how many of `size` steps of `stride` from `start` (None = its beginning) stay in the base's axis."""
    axis = _axis_of(base, stride)
    step, rest = divmod(stride, base.strides[axis])
    if rest:
        raise _AcrossRows(f"a stride of {stride} fits no axis of a tensor with strides {base.strides}")
    at = 0 if start is None else start[axis]
    return min(size, max(1, -(-(base.sizes[axis] - at) // step)))


def _axis_of(base: Strided, stride: int) -> int:
    """Return the axis with the largest stride that `stride` reaches."""
    fitting = [axis for axis, size in enumerate(base.sizes) if size > 1 and base.strides[axis] <= stride]
    if not fitting:
        raise _AcrossRows(f"a stride of {stride} fits no axis of a tensor with strides {base.strides}")
    return max(fitting, key=lambda axis: base.strides[axis])


def _choose(
    source_base: Strided, dest_base: Strided, axes: Sequence[_Joint]
) -> tuple[tuple[tuple[int, int, int], ...], list[_Joint]]:
    """Keep at most one unit-step axis per axis of each base, the longest ones; the others are counted through."""
    kept: list[tuple[int, int, int]] = []
    counted: list[_Joint] = []
    for axis in sorted(axes, key=lambda axis: -axis.size):
        a, b = _axis_of(source_base, axis.source), _axis_of(dest_base, axis.dest)
        unit = axis.source == source_base.strides[a] and axis.dest == dest_base.strides[b]
        if unit and all(a != other_a and b != other_b for other_a, other_b, _ in kept):
            kept.append((a, b, axis.size))
        else:
            counted.append(axis)
    return tuple(sorted(kept)), counted
