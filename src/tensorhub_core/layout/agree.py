"""Compare, by checksums, bytes that must be equal: tied tensors, and copies of one region in several sources."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.holdings import Holding
from tensorhub_core.layout.pieces import Piece, SourceTables, fully_inside, piece_of, touched
from tensorhub_core.layout.regions import Point, is_empty

Conflict = tuple[str, int, int]
"""A logical name, and two sources that hold different bytes for one region of it."""


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
