"""Cut storages into segments: boxes that are also contiguous byte runs, numbered in canonical order."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.types import Layout, Segment


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """List a layout's segments: `storage` i32, `offset_bytes` u64 and `length_bytes` u64, all [segments].

    The segments of storage `i` are `first[i] .. first[i + 1]` (`first` i64 [storages + 1]).
    """

    storage: NDArray[np.int32]
    offset_bytes: NDArray[np.uint64]
    length_bytes: NDArray[np.uint64]
    first: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all segments."""
        return int(self.length_bytes.sum())


class Grid(NamedTuple):
    """Say how a tensor is cut: `outer` times (once per index of the axes before `axis`) into `chunks` along `axis`.

    Each chunk has `rows` indices of `axis` (the last one may have fewer) and all of the axes after it, `slab_bytes` per
    index. A 0-dim tensor is cut along no axis: `axis` is 0 and `rows` 1.
    """

    axis: int
    outer: int
    chunks: int
    rows: int
    slab_bytes: int

    @property
    def segments(self) -> int:
        """Return the number of segments."""
        return self.outer * self.chunks


def grid_of(shape: tuple[int, ...], item_bytes: int, segment_bytes: int) -> Grid:
    """Cut along the first axis whose inner slab fits into `segment_bytes` (at least `item_bytes`)."""
    size = prod(shape) * item_bytes
    if size == 0:
        return Grid(0, 0, 0, 1, 0)
    if not shape:
        return Grid(0, 1, 1, 1, item_bytes)
    outer = 1
    slab = size
    for axis, length in enumerate(shape):
        slab //= length
        if slab <= segment_bytes:
            rows = min(length, segment_bytes // slab)
            return Grid(axis, outer, -(-length // rows), rows, slab)
        outer *= length
    raise ValueError(f"segment_bytes {segment_bytes} is below the {item_bytes} bytes of one element")


def segment_table(layout: Layout) -> SegmentTable:
    """Number the layout's segments in canonical order: by storage, then by offset."""
    grids: list[tuple[int, int, int, int]] = []
    for group in layout.storages:
        spec = layout.tensors[group[0]]
        size = prod(spec.shape) * dtype_bytes(spec.dtype)
        if size <= layout.segment_bytes:
            grids.append((min(size, 1), 1, size, size))
        else:
            grid = grid_of(spec.shape, dtype_bytes(spec.dtype), layout.segment_bytes)
            grids.append((grid.segments, grid.chunks, grid.rows * grid.slab_bytes, size // grid.outer))
    counts, chunks, step, span = np.array(grids, np.int64).reshape(-1, 4).T
    first = np.zeros(len(grids) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    storage = np.repeat(np.arange(len(grids)), counts)
    outer, chunk = np.divmod(np.arange(len(storage)) - first[storage], chunks[storage])
    start = chunk * step[storage]
    length = np.minimum(step[storage], span[storage] - start)
    offset = outer * span[storage] + start
    return SegmentTable(storage.astype(np.int32), offset.astype(np.uint64), length.astype(np.uint64), first)


def segment_box(layout: Layout, table: SegmentTable, index: int) -> Segment:
    """Return one segment with its box; raises IndexError when there is none of that number."""
    if not 0 <= index < len(table):
        raise IndexError(f"segment {index} of {len(table)}")
    storage = int(table.storage[index])
    spec = layout.tensors[layout.storages[storage][0]]
    grid = grid_of(spec.shape, dtype_bytes(spec.dtype), layout.segment_bytes)
    start, shape = box_in_grid(spec.shape, grid, index - int(table.first[storage]))
    return Segment(index, storage, int(table.offset_bytes[index]), int(table.length_bytes[index]), start, shape)


def box_in_grid(shape: tuple[int, ...], grid: Grid, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return start and shape, in elements, of a tensor's `number`-th segment."""
    if not shape:
        return (), ()
    position, chunk = divmod(number, grid.chunks)
    lead: list[int] = []
    for length in reversed(shape[: grid.axis]):
        position, at = divmod(position, length)
        lead.append(at)
    row = chunk * grid.rows
    rows = min(grid.rows, shape[grid.axis] - row)
    inner = shape[grid.axis + 1 :]
    return (*reversed(lead), row, *(0,) * len(inner)), (*(1,) * grid.axis, rows, *inner)
