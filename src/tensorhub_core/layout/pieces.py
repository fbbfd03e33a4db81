"""Relate pieces of logical tensors to the segments of the sources and the bytes of the destination."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.holdings import Holding
from tensorhub_core.layout.regions import Point, Region, align, c_strides
from tensorhub_core.layout.segments import Grid, SegmentTable, box_in_grid, grid_of, segment_table
from tensorhub_core.layout.types import Layout, TensorSpec


class Piece(msgspec.Struct, frozen=True):
    """Numbers that move as one box: from a source's storage to a storage of the destination, in elements.

    They are bytes as they are, or converted where the dtypes differ. `src_start` has the rank of the source's tensor,
    `dst_start` that of the destination's, `shape` the longer of both.
    """

    source: int
    src_storage: int
    src_spec: TensorSpec
    src_start: Point
    dst_storage: int
    dst_spec: TensorSpec
    dst_start: Point
    shape: Point

    @property
    def casts(self) -> bool:
        """Tell whether the numbers are converted: they then take other bytes here than there."""
        return self.src_spec.dtype != self.dst_spec.dtype


class Part(NamedTuple):
    """The part of a piece that lies in one segment, in elements.

    It is the box `start`, `length` of a segment of `shape`, and goes to `dst_start` of the destination's tensor.
    """

    start: Point
    length: Point
    shape: Point
    dst_start: Point


class SourceTables:
    """Segment tables and checksums of the sources, with the grid of each storage on demand."""

    def __init__(self, sources: Sequence[Layout], sums: Sequence[NDArray[np.uint64]] | None) -> None:
        self.layouts = sources
        self.tables: list[SegmentTable] = [segment_table(layout) for layout in sources]
        self.sums = None if sums is None else list(sums)
        self.base: list[int] = np.cumsum([0, *map(len, self.tables)]).tolist()
        """The number of each source's first segment when the segments of all sources are numbered through."""
        self.compared: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        """Segments, numbered through, whose checksums were compared with each other."""
        self._firsts: list[list[int]] = [table.first.tolist() for table in self.tables]
        self._grids: dict[tuple[int, int, Point], Grid] = {}

    def segments(self, source: int, storage: int) -> tuple[int, int]:
        """Return the number of the storage's first segment, and of its segments."""
        first = self._firsts[source]
        return first[storage], first[storage + 1] - first[storage]

    def grid(self, source: int, spec: TensorSpec) -> Grid:
        """Return how a source's tensor is cut into segments."""
        key = (self.layouts[source].segment_bytes, dtype_bytes(spec.dtype), spec.shape)
        grid = self._grids.get(key)
        if grid is None:
            grid = self._grids[key] = grid_of(spec.shape, key[1], key[0])
        return grid


def piece_of(holding: Holding, part: Region, wanted: Holding) -> Piece:
    """Locate a part of a logical tensor on both sides; `wanted` is the destination's region of it."""
    length = tuple(map(sub, part[1], part[0]))
    rank = max(len(holding.local), len(wanted.local))
    return Piece(
        holding.source,
        holding.storage,
        holding.spec,
        _local(holding, part[0]),
        wanted.storage,
        wanted.spec,
        _local(wanted, part[0]),
        length if len(length) == rank else align(length, rank, 1),
    )


def _local(holding: Holding, point: Point) -> Point:
    """Convert logical to physical coordinates; the axes are aligned at the last one."""
    if point == holding.lo:
        return holding.local
    within = tuple(map(sub, point, holding.lo))
    rank = len(holding.local)
    return tuple(map(add, holding.local, within if len(within) == rank else align(within, rank, 0)))


def covers_source(piece: Piece) -> bool:
    """Tell whether the piece is all of the source's tensor."""
    shape = piece.src_spec.shape
    return align(piece.shape, len(shape), 1) == shape


def part_of(piece: Piece, grid: Grid, number: int) -> Part:
    """Return the part of a piece in its storage's segment of this number, which it touches."""
    begin = piece.src_start
    at, shape = box_in_grid(piece.src_spec.shape, grid, number)
    full = align(piece.shape, len(begin), 1)
    lo = tuple(map(max, at, begin))
    hi = tuple(min(a + b, c + d) for a, b, c, d in zip(at, shape, begin, full, strict=True))
    moved = align(tuple(map(sub, lo, begin)), len(piece.dst_start), 0)
    return Part(
        start=tuple(map(sub, lo, at)),
        length=tuple(map(sub, hi, lo)),
        shape=shape,
        dst_start=tuple(map(add, piece.dst_start, moved)),
    )


def lattice(lengths: Point, strides: Point) -> NDArray[np.int64]:
    """Return the C-ordered positions of a box in steps of `strides`, from its first corner: i64 [points]."""
    positions = np.zeros(1, np.int64)
    for length, stride in zip(lengths, strides, strict=True):
        positions = (positions[:, None] + np.arange(length, dtype=np.int64) * stride).reshape(-1)
    return positions


def touched(piece: Piece, grid: Grid) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers, in their storage, of the segments that a piece touches: i64 [outer, chunk].

    Also returns the chunks along the grid's axis: i64 [chunk].
    """
    start, full = piece.src_start, piece.src_spec.shape
    if not start:
        return np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    shape = align(piece.shape, len(start), 1)
    strides = c_strides(full[: grid.axis])
    corner = sum(at * stride for at, stride in zip(start, strides, strict=False))
    outer = corner + lattice(shape[: grid.axis], strides)
    row = start[grid.axis]
    chunk = np.arange(row // grid.rows, -(-(row + shape[grid.axis]) // grid.rows), dtype=np.int64)
    return outer[:, None] * grid.chunks + chunk, chunk


def fully_inside(piece: Piece, grid: Grid, chunk: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell for each chunk along the grid's axis whether its segments lie wholly inside the piece."""
    full = piece.src_spec.shape
    if not full:
        return np.ones_like(chunk, np.bool_)
    shape = align(piece.shape, len(full), 1)
    if shape[grid.axis + 1 :] != full[grid.axis + 1 :]:
        return np.zeros_like(chunk, np.bool_)
    row = piece.src_start[grid.axis]
    first, last = chunk * grid.rows, np.minimum((chunk + 1) * grid.rows, full[grid.axis])
    return np.asarray((first >= row) & (last <= row + shape[grid.axis]))
