"""Compare, by checksums, bytes that must be equal: tied tensors, and copies of one region in several sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import sub

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.holdings import Holding, end_of
from tensorhub_core.layout.pieces import Piece, SourceTables, fully_inside, piece_of, touched
from tensorhub_core.layout.regions import Point, Region, align, intersect, is_empty, subtract

Conflict = tuple[str, int, int]
"""A logical name, and two sources that hold different bytes for one region of it."""

_MOST_PAIRS = 1 << 18
"""Places of names that share memory which are compared one by one; ties of models take a few."""


def same_places(pieces: Sequence[Piece], wanted: Sequence[Holding], index: Sequence[Sequence[Holding]]) -> bool:
    """Tell whether what pieces bring to a tensor is what another one on its memory wants, read where it could be read.

    `index` are the holdings of what each of `wanted` is a region of. Unlike checksums, this does not mind which of
    several sources was chosen for either, nor what else lies in a segment.
    """
    held: dict[tuple[int, int], list[tuple[Holding, Holding]]] = {}
    for region, holdings in zip(wanted, index, strict=True):
        for holding in holdings:
            held.setdefault((holding.source, holding.storage), []).append((holding, region))
    if len(pieces) * max(map(len, held.values()), default=0) > _MOST_PAIRS:
        return False
    if sum(prod(piece.shape) for piece in pieces) != sum(prod(map(sub, each.hi, each.lo)) for each in wanted):
        return False
    return all(_is_brought(piece, held.get((piece.source, piece.src_storage), ())) for piece in pieces)


def _is_brought(piece: Piece, held: Sequence[tuple[Holding, Holding]]) -> bool:
    """Tell whether every point of a piece is wanted from where it comes."""
    left = [_place(piece)]
    for holding, region in held:
        common = intersect((holding.lo, holding.hi), (region.lo, region.hi))
        other = None if common is None else piece_of(holding, common, region)
        if other is None or not _in_step(piece, other):
            continue
        place = _place(other)
        parts = [(each, intersect(each, place)) for each in left]
        left = [rest for each, part in parts for rest in ([each] if part is None else subtract(each, part))]
    return not left


def _place(piece: Piece) -> Region:
    """Return the box of the destination's tensor that a piece fills."""
    return piece.dst_start, end_of(piece.dst_start, align(piece.shape, len(piece.dst_start), 1))


def _in_step(one: Piece, other: Piece) -> bool:
    """Tell whether two pieces out of one storage bring each of its elements to the same place."""
    there, here = (
        tuple(map(sub, *starts)) for starts in ((one.src_start, other.src_start), (one.dst_start, other.dst_start))
    )
    rank = max(len(there), len(here))
    return align(there, rank, 0) == align(here, rank, 0)


def same_bytes(ones: list[Piece], others: list[Piece], tables: SourceTables) -> bool:
    """Tell whether two ways to fill one storage are proven to bring the same bytes to the same places."""
    ones, others = (sorted(pieces, key=lambda piece: piece.dst_start) for pieces in (ones, others))
    return len(ones) == len(others) and all(_same_piece(*pair, tables) for pair in zip(ones, others, strict=True))


def _same_piece(one: Piece, other: Piece, tables: SourceTables) -> bool:
    if one.dst_start != other.dst_start or one.shape != other.shape or one.src_start != other.src_start:
        return False
    if (one.source, one.src_storage) == (other.source, other.src_storage):
        return True
    return sums_agree(one, other, tables, inside_only=False) is True


def sums_agree(one: Piece, other: Piece, tables: SourceTables, *, inside_only: bool) -> bool | None:
    """Compare the checksums of two pieces' segments; None if they cannot be compared.

    `inside_only` leaves out segments that also hold bytes outside of the pieces, which may differ.
    """
    sums = tables.sums
    if sums is None or one.src_spec.shape != other.src_spec.shape or one.src_start != other.src_start:
        return None
    grid = tables.grid(one.source, one.src_spec)
    if grid != tables.grid(other.source, other.src_spec) or one.src_spec.dtype != other.src_spec.dtype:
        return None
    first_one, _ = tables.segments(one.source, one.src_storage)
    first_other, _ = tables.segments(other.source, other.src_storage)
    numbers, chunk = touched(one, grid)
    if inside_only:
        numbers = numbers[:, fully_inside(one, grid, chunk)]
    ones, others = numbers.reshape(-1) + first_one, numbers.reshape(-1) + first_other
    tables.compared.append((ones + tables.base[one.source], others + tables.base[other.source]))
    return bool(np.array_equal(sums[one.source][ones], sums[other.source][others]))


def conflicts(index: Mapping[str, list[Holding]], tables: SourceTables) -> list[Conflict]:
    """Return the logical tensors for which two sources hold different bytes, as far as checksums can tell."""
    if tables.sums is None:
        return []
    found: list[Conflict] = []
    whole: list[tuple[Conflict, Holding, Holding]] = []
    for logical, held in index.items():
        if len(held) < 2:
            continue
        models: dict[tuple[Point, ...], Holding] = {}
        for holding in held:
            model = models.setdefault((holding.lo, holding.hi, holding.spec.shape, holding.local), holding)
            if model is holding or is_empty(holding.lo, holding.hi):
                continue
            conflict = (logical, model.source, holding.source)
            if _is_whole_twin(model, holding, tables):
                whole.append((conflict, model, holding))
                continue
            region = (holding.lo, holding.hi)
            one, other = piece_of(model, region, model), piece_of(holding, region, holding)
            if sums_agree(one, other, tables, inside_only=True) is False:
                found.append(conflict)
    return found + _whole_conflicts(whole, tables, tables.sums)


def _is_whole_twin(one: Holding, other: Holding, tables: SourceTables) -> bool:
    """Tell whether both are the whole tensor, cut alike; the shapes are known to be equal."""
    layouts = tables.layouts
    return (
        one.spec.boxes is None
        and other.spec.boxes is None
        and one.spec.dtype == other.spec.dtype
        and layouts[one.source].segment_bytes == layouts[other.source].segment_bytes
    )


def _whole_conflicts(
    pairs: list[tuple[Conflict, Holding, Holding]], tables: SourceTables, sums: list[NDArray[np.uint64]]
) -> list[Conflict]:
    """Compare whole tensors, all at once: there may be tens of thousands of small ones."""
    if not pairs:
        return []
    flat = np.concatenate(sums)
    firsts = np.empty((2, len(pairs)), np.int64)
    counts = np.empty(len(pairs), np.int64)
    for number, (_, *both) in enumerate(pairs):
        for side, holding in enumerate(both):
            first, counts[number] = tables.segments(holding.source, holding.storage)
            firsts[side, number] = tables.base[holding.source] + first
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ones, others = (np.repeat(side, counts) + within for side in firsts)
    tables.compared.append((ones, others))
    wrong = np.unique(np.repeat(np.arange(len(pairs)), counts)[flat[ones] != flat[others]])
    return [pairs[number][0] for number in wrong.tolist()]
