"""Turn pieces into reads of segments or of cuts: in place where one lands in one run, through staging elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import mul

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.exact import NO_CUT, WHOLE, Choices, Need
from tensorhub_core.layout.pieces import Piece, SourceTables, covers_source, lattice, part_of, touched
from tensorhub_core.layout.placing import Placing
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.regions import Point, align, c_strides, is_contiguous
from tensorhub_core.layout.segments import Grid
from tensorhub_core.layout.types import TensorSpec

MAX_LANDINGS = 1 << 22
"""Places where the segments of one plan may land; more of them would be a few bytes each."""

_SOURCE_SHIFT = 32
_SEGMENT_MASK = (1 << _SOURCE_SHIFT) - 1
_KEY, _STORAGE, _OFFSET, _PIECE, _LANDS, _CHOICE = range(6)

_Ints = NDArray[np.int64]
_Columns = NDArray[np.int64]
"""i64 [6, landings]: key = source and segment, offset in bytes of the storage, choice = what would be read for this
piece alone, lands = 1 where no other bytes would be read and they land in one run."""


def assemble(pieces: Sequence[Piece], tables: SourceTables, policies: Sequence[ExactPolicy | None]) -> ReadPlan:
    """Plan reads that deliver all pieces, each segment once or in cuts; raises LayoutMismatch if there are too many.

    `policies`: by source, when its segments are cut; None = never.
    """
    choices = Choices(policies)
    landings = _landings(pieces, tables, choices)
    landings = landings[:, np.lexsort((landings[_OFFSET], landings[_STORAGE]))]
    group = np.unique(landings[_KEY], return_inverse=True)[1].reshape(-1)
    alone = np.bincount(group)[group] == 1
    uncut = alone & (landings[_CHOICE] == NO_CUT)
    landings[_CHOICE, uncut], landings[_LANDS, uncut] = WHOLE, 0
    if not alone.all():
        group = _share(landings, group, np.flatnonzero(~alone), pieces, tables, choices)
    _, first, read_of, uses = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    direct = (uses[order] == 1) & (landings[_LANDS, first[order]] == 1)
    return _plan(landings, first[order], place[read_of.reshape(-1)], direct, pieces, tables, choices)


def _plan(
    landings: _Columns,
    first: _Ints,
    read_of: _Ints,
    direct: NDArray[np.bool_],
    pieces: Sequence[Piece],
    tables: SourceTables,
    choices: Choices,
) -> ReadPlan:
    """Write down the reads: `first` is the first landing of each, `read_of` the read of each landing."""
    source = (landings[_KEY, first] >> _SOURCE_SHIFT).astype(np.int32)
    segment = (landings[_KEY, first] & _SEGMENT_MASK).astype(np.int32)
    choice = landings[_CHOICE, first]
    length_bytes = choices.lengths()[choice].astype(np.uint64)
    for number, table in enumerate(tables.tables):
        mine = (source == number) & (choice == WHOLE)
        length_bytes[mine] = table.length_bytes[segment[mine]]
    is_cut = choice != WHOLE
    staged = np.flatnonzero(~direct[read_of])
    staged = staged[np.argsort(read_of[staged], kind="stable")]
    within = (landings[_KEY, staged] & _SEGMENT_MASK) - _firsts(pieces, tables)[landings[_PIECE, staged]]
    return ReadPlan(
        raw=False,
        source=source,
        segment=segment,
        length_bytes=length_bytes,
        direct=direct,
        storage=landings[_STORAGE, first].astype(np.int32),
        offset_bytes=landings[_OFFSET, first].astype(np.uint64),
        scatters=Placing(pieces, tables.layouts, choices, read_of[staged], landings[_PIECE, staged], within, choice),
        total_bytes=int(length_bytes.sum()),
        cut=np.where(is_cut, np.cumsum(is_cut) - 1, -1).astype(np.int32),
        cuts=choices.cuts(segment[is_cut], choice[is_cut]),
        casts=any(piece.casts for piece in pieces),
    )


def _firsts(pieces: Sequence[Piece], tables: SourceTables) -> _Ints:
    """Return the number of the first segment of each piece's source storage, i64 [pieces]."""
    return np.array([tables.segments(piece.source, piece.src_storage)[0] for piece in pieces], np.int64)


def _share(
    landings: _Columns,
    group: _Ints,
    shared: _Ints,
    pieces: Sequence[Piece],
    tables: SourceTables,
    choices: Choices,
) -> _Ints:
    """Decide for segments that several pieces need whether they are read once or cut for each; returns new groups.

    `group` and the result are i64 [landings]: landings of one group come with one read.
    """
    group = group.copy()
    shared = shared[np.argsort(group[shared], kind="stable")]
    whole = np.zeros(int(group.max()) + 1, np.bool_)
    whole[group[shared[landings[_CHOICE, shared] == WHOLE]]] = True
    settled = whole[group[shared]]
    landings[_CHOICE, shared[settled]] = WHOLE
    shared = shared[~settled]
    begins = np.flatnonzero(np.diff(group[shared], prepend=-1))
    firsts, added = _firsts(pieces, tables), len(whole)
    for begin, end in pairwise([*begins.tolist(), len(shared)]):
        mine = shared[begin:end]
        needs = tuple(_need_of(landings[:, at].tolist(), pieces, tables, firsts) for at in mine.tolist())
        numbers = choices.for_several(int(landings[_KEY, mine[0]] >> _SOURCE_SHIFT), needs)
        landings[_CHOICE, mine] = numbers
        if len(numbers) > 1:
            landings[_LANDS, mine] = [choices.lands(*pair) for pair in zip(numbers, needs, strict=True)]
            group[mine] = added + np.arange(len(mine))
            added += len(mine)
    return group


def _need_of(landing: list[int], pieces: Sequence[Piece], tables: SourceTables, firsts: _Ints) -> Need:
    piece = pieces[landing[_PIECE]]
    within = (landing[_KEY] & _SEGMENT_MASK) - int(firsts[landing[_PIECE]])
    part = part_of(piece, tables.grid(piece.source, piece.src_spec), within)
    return _need(piece, part.start, part.length, part.shape)


def _need(piece: Piece, start: Point, length: Point, shape: Point) -> Need:
    """Describe a part of a piece in one segment."""
    full = piece.dst_spec.shape
    lands = not piece.casts and is_contiguous(align(length, len(full), 1), full)
    return Need(start, length, shape, dtype_bytes(piece.src_spec.dtype), lands)


def _landings(pieces: Sequence[Piece], tables: SourceTables, choices: Choices) -> _Columns:
    runs: list[tuple[int, int, int, int, bool, int]] = []
    sizes: list[int] = []
    blocks: list[_Columns] = []
    count = 0
    kinds: dict[tuple[object, ...], tuple[bool, bool, int]] = {}
    places: dict[tuple[Point, str], Point] = {}
    for number, piece in enumerate(pieces):
        first, segments = tables.segments(piece.source, piece.src_storage)
        spec, into = piece.src_spec, piece.dst_spec
        # Most pieces of a model are like others: what holds for one is worked out once.
        kind = (piece.source, spec.shape, spec.dtype, piece.src_start, piece.shape, into.shape, into.dtype)
        if kind not in kinds:
            kinds[kind] = _kind(piece, segments, choices)
        in_runs, lands, choice = kinds[kind]
        steps = places.get((into.shape, into.dtype))
        if steps is None:
            steps = places[into.shape, into.dtype] = _steps(into)
        offset = sum(map(mul, piece.dst_start, steps))
        key = (piece.source << _SOURCE_SHIFT) + first
        if in_runs:
            runs.append((key, piece.dst_storage, offset, number, lands, choice))
            sizes.append(segments)
            count += segments
        else:
            blocks.append(_block(piece, tables, choices, key, number, offset))
            count += blocks[-1].shape[1]
        if count > MAX_LANDINGS:
            raise LayoutMismatch(f"the plan needs more than {MAX_LANDINGS:,} copies: the layouts are cut too finely")
    return np.concatenate(
        [_runs(np.array(runs, np.int64).reshape(-1, 6).T, np.array(sizes, np.int64), tables), *blocks], axis=1
    )


def _steps(spec: TensorSpec) -> Point:
    """Return the bytes from one element to the next along each axis."""
    item_bytes = dtype_bytes(spec.dtype)
    return tuple(stride * item_bytes for stride in c_strides(spec.shape))


def _kind(piece: Piece, segments: int, choices: Choices) -> tuple[bool, bool, int]:
    """Return whether a piece is a run of whole segments or in a single one, whether it lands, and what is read."""
    shape, full = piece.src_spec.shape, piece.dst_spec.shape
    if covers_source(piece):
        whole = not piece.casts and is_contiguous(align(piece.shape, len(full), 1), full)
        return segments == 1 or whole, whole, WHOLE
    if segments > 1:
        return False, False, WHOLE
    need = _need(piece, piece.src_start, align(piece.shape, len(shape), 1), shape)
    choice = choices.for_one(piece.source, need)
    return True, choices.lands(choice, need), choice


def _runs(firsts: _Columns, sizes: _Ints, tables: SourceTables) -> _Columns:
    """Spread out runs of segments that keep their distances: `firsts` has the first landing of each."""
    columns = np.repeat(firsts, sizes, axis=1)
    ends = np.cumsum(sizes)
    columns[_KEY] += np.arange(columns.shape[1]) - np.repeat(ends - sizes, sizes)
    source, segment = columns[_KEY] >> _SOURCE_SHIFT, columns[_KEY] & _SEGMENT_MASK
    for number, table in enumerate(tables.tables):
        mine = source == number
        columns[_OFFSET, mine] += table.offset_bytes[segment[mine]].astype(np.int64)
    return columns


def _block(piece: Piece, tables: SourceTables, choices: Choices, key: int, number: int, offset: int) -> _Columns:
    """Return the landings of a piece of a tensor that is cut into several segments."""
    grid = tables.grid(piece.source, piece.src_spec)
    segments, chunk = touched(piece, grid)
    shape = align(piece.shape, len(piece.src_start), 1)
    strides = align(c_strides(piece.dst_spec.shape), len(shape), 0)
    row = piece.src_start[grid.axis]
    rows = (np.maximum(chunk * grid.rows, row) - row) * strides[grid.axis]
    elements = lattice(shape[: grid.axis], strides[: grid.axis])[:, None] + rows
    columns = np.empty((6, segments.size), np.int64)
    columns[_KEY] = key + segments.reshape(-1)
    columns[_STORAGE] = piece.dst_storage
    columns[_OFFSET] = offset + elements.reshape(-1) * dtype_bytes(piece.dst_spec.dtype)
    columns[_PIECE] = number
    chosen = _choose_along(piece, choices, grid, chunk)
    columns[_LANDS:] = np.broadcast_to(chosen[:, None, :], (2, *segments.shape)).reshape(2, -1)
    return columns


def _choose_along(piece: Piece, choices: Choices, grid: Grid, chunk: _Ints) -> _Ints:
    """Choose what to read of the segments in each chunk along the grid's axis: lands and choice, i64 [2, chunk]."""
    axis, full = grid.axis, piece.src_spec.shape
    shape = align(piece.shape, len(full), 1)
    row, first = piece.src_start[axis], chunk * grid.rows
    begin, end = np.maximum(first, row), np.minimum(first + grid.rows, row + shape[axis])
    found: dict[tuple[int, int, int], tuple[bool, int]] = {}
    kinds = np.stack([begin - first, end - begin, np.minimum(grid.rows, full[axis] - first)], axis=1)
    chosen: list[tuple[bool, int]] = []
    for kind in map(tuple, kinds.tolist()):
        if kind not in found:
            start, length, rows = kind
            lead, inner = (0,) * axis, piece.src_start[axis + 1 :]
            ones = (1,) * axis
            need = _need(
                piece,
                (*lead, start, *inner),
                (*ones, length, *shape[axis + 1 :]),
                (*ones, rows, *full[axis + 1 :]),
            )
            choice = choices.for_one(piece.source, need)
            found[kind] = choices.lands(choice, need), choice
        chosen.append(found[kind])
    return np.array(chosen, np.int64).T
