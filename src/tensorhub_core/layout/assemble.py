"""Turn pieces into reads of whole segments: in place where a segment lands as it is, through staging elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.cuts import no_cuts
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.pieces import Piece, SourceTables, covers_source, fully_inside, lattice, touched
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.regions import Point, align, c_strides, is_contiguous
from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.segments import Grid, box_in_grid

MAX_LANDINGS = 1 << 22
"""Places where the segments of one plan may land; more of them would be a few bytes each."""

_SOURCE_SHIFT = 32
_SEGMENT_MASK = (1 << _SOURCE_SHIFT) - 1
_KEY, _STORAGE, _OFFSET, _PIECE, _WHOLE = range(5)

_Columns = NDArray[np.int64]
"""i64 [5, landings]: key = source and segment, offset in bytes of the storage, whole = 1 where the segment
lands as it is, in one run."""


def assemble(pieces: Sequence[Piece], tables: SourceTables) -> ReadPlan:
    """Plan reads that deliver all pieces, each segment read once; raises LayoutMismatch if there are too many."""
    landings = _landings(pieces, tables)
    landings = landings[:, np.lexsort((landings[_OFFSET], landings[_STORAGE]))]
    keys, first, read_of, uses = np.unique(landings[_KEY], return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    read_of, keys, first = place[read_of.reshape(-1)], keys[order], first[order]
    direct = (uses[order] == 1) & (landings[_WHOLE, first] == 1)
    source = (keys >> _SOURCE_SHIFT).astype(np.int32)
    segment = (keys & _SEGMENT_MASK).astype(np.int32)
    length_bytes = np.zeros(len(keys), np.uint64)
    for number, table in enumerate(tables.tables):
        mine = source == number
        length_bytes[mine] = table.length_bytes[segment[mine]]
    staged = np.flatnonzero(~direct[read_of])
    return ReadPlan(
        raw=False,
        source=source,
        segment=segment,
        length_bytes=length_bytes,
        direct=direct,
        storage=landings[_STORAGE, first].astype(np.int32),
        offset_bytes=landings[_OFFSET, first].astype(np.uint64),
        scatters=_scatters(pieces, tables, landings[:, staged], read_of[staged]),
        total_bytes=int(length_bytes.sum()),
        cut=np.full(len(keys), -1, np.int32),
        cuts=no_cuts(),
    )


def _landings(pieces: Sequence[Piece], tables: SourceTables) -> _Columns:
    runs: list[tuple[int, int, int, int, bool]] = []
    sizes: list[int] = []
    blocks: list[_Columns] = []
    count = 0
    for number, piece in enumerate(pieces):
        first, segments = tables.segments(piece.source, piece.src_storage)
        key = (piece.source << _SOURCE_SHIFT) + first
        offset, whole = _place(piece)
        if segments == 1 or whole:
            runs.append((key, piece.dst_storage, offset, number, whole))
            sizes.append(segments)
            count += segments
        else:
            blocks.append(_block(piece, tables, key, number, offset))
            count += blocks[-1].shape[1]
        if count > MAX_LANDINGS:
            raise LayoutMismatch(f"the plan needs more than {MAX_LANDINGS:,} copies: the layouts are cut too finely")
    return np.concatenate(
        [_runs(np.array(runs, np.int64).reshape(-1, 5).T, np.array(sizes, np.int64), tables), *blocks], axis=1
    )


def _runs(firsts: _Columns, sizes: NDArray[np.int64], tables: SourceTables) -> _Columns:
    """Spread out runs of segments that keep their distances: `firsts` has the first landing of each."""
    columns = np.repeat(firsts, sizes, axis=1)
    ends = np.cumsum(sizes)
    columns[_KEY] += np.arange(columns.shape[1]) - np.repeat(ends - sizes, sizes)
    source, segment = columns[_KEY] >> _SOURCE_SHIFT, columns[_KEY] & _SEGMENT_MASK
    for number, table in enumerate(tables.tables):
        mine = source == number
        columns[_OFFSET, mine] += table.offset_bytes[segment[mine]].astype(np.int64)
    return columns


def _place(piece: Piece) -> tuple[int, bool]:
    """Return where the piece begins in its storage, in bytes, and whether it is a whole source tensor in one run."""
    full = piece.dst_spec.shape
    corner = sum(at * stride for at, stride in zip(piece.dst_start, c_strides(full), strict=True))
    whole = covers_source(piece) and is_contiguous(align(piece.shape, len(full), 1), full)
    return corner * dtype_bytes(piece.dst_spec.dtype), whole


def _block(piece: Piece, tables: SourceTables, key: int, number: int, offset: int) -> _Columns:
    """Return the landings of a piece of a tensor that is cut into several segments."""
    grid = tables.grid(piece.source, piece.src_spec)
    segments, chunk = touched(piece, grid)
    shape = align(piece.shape, len(piece.src_start), 1)
    strides = align(c_strides(piece.dst_spec.shape), len(shape), 0)
    row = piece.src_start[grid.axis]
    rows = (np.maximum(chunk * grid.rows, row) - row) * strides[grid.axis]
    elements = lattice(shape[: grid.axis], strides[: grid.axis])[:, None] + rows
    columns = np.empty((5, segments.size), np.int64)
    columns[_KEY] = key + segments.reshape(-1)
    columns[_STORAGE] = piece.dst_storage
    columns[_OFFSET] = offset + elements.reshape(-1) * dtype_bytes(piece.dst_spec.dtype)
    columns[_PIECE] = number
    whole = fully_inside(piece, grid, chunk) & _lands_in_one_run(piece, grid, chunk)
    columns[_WHOLE] = np.broadcast_to(whole, segments.shape).reshape(-1)
    return columns


def _lands_in_one_run(piece: Piece, grid: Grid, chunk: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell for each chunk along the grid's axis whether its segments, if inside the piece, land contiguously."""
    source, full = piece.src_spec.shape, piece.dst_spec.shape
    rows = np.minimum(grid.rows, source[grid.axis] - chunk * grid.rows)
    runs = {
        length: is_contiguous(align((*(1,) * grid.axis, length, *source[grid.axis + 1 :]), len(full), 1), full)
        for length in set(rows.tolist())
    }
    return np.array([runs[length] for length in rows.tolist()], np.bool_)


def _scatters(
    pieces: Sequence[Piece], tables: SourceTables, staged: _Columns, reads: NDArray[np.int64]
) -> dict[int, tuple[Scatter, ...]]:
    found: dict[int, list[Scatter]] = {}
    grids: dict[int, Grid] = {}
    for read, key, number in zip(reads.tolist(), staged[_KEY].tolist(), staged[_PIECE].tolist(), strict=True):
        piece = pieces[number]
        if number not in grids:
            grids[number] = tables.grid(piece.source, piece.src_spec)
        first, _ = tables.segments(piece.source, piece.src_storage)
        segment = (key & _SEGMENT_MASK) - first
        found.setdefault(read, []).append(_scatter(piece, *box_in_grid(piece.src_spec.shape, grids[number], segment)))
    return {read: tuple(scatters) for read, scatters in sorted(found.items())}


def _scatter(piece: Piece, start: Point, shape: Point) -> Scatter:
    """Return the part of a piece that lies in the segment with this box."""
    begin = piece.src_start
    length = align(piece.shape, len(begin), 1)
    lo = tuple(map(max, start, begin))
    hi = tuple(min(a + b, c + d) for a, b, c, d in zip(start, shape, begin, length, strict=True))
    moved = align(tuple(a - b for a, b in zip(lo, begin, strict=True)), len(piece.dst_start), 0)
    return Scatter(
        storage=piece.dst_storage,
        dst_start=tuple(a + b for a, b in zip(piece.dst_start, moved, strict=True)),
        src_start=tuple(a - b for a, b in zip(lo, start, strict=True)),
        shape=align(tuple(b - a for a, b in zip(lo, hi, strict=True)), len(piece.shape), 1),
    )
