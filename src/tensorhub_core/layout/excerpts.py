"""Plan one part of a version after the other from the same sources, each at the cost of that part alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.casting import Cast
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.holdings import holdings_of
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout

_Ints = NDArray[np.int64]


class Excerpts:
    """The sources of a version, of which a part needs only some storages; they stay what they are."""

    def __init__(self, sources: Sequence[Layout], tables: Sequence[SegmentTable]) -> None:
        """Index the sources, once: `tables` are their segments."""
        self._sources, self._tables = list(sources), list(tables)
        self._storages = [_storages_by_name(source) for source in sources]

    def are_of(self, sources: Sequence[Layout]) -> bool:
        """Tell whether these are the sources."""
        pairs = zip(self._sources, sources, strict=False)
        return len(self._sources) == len(sources) and all(one is other for one, other in pairs)

    def plan(
        self,
        destination: Layout,
        sums: Sequence[NDArray[np.uint64]],
        exact: Sequence[ExactPolicy | None],
        cast: Cast | Sequence[Cast] = False,
    ) -> ReadPlan:
        """Return what `plan_read` returns for a destination all of whose tensors have boxes, and raise what it raises.

        A destination without boxes could be equal to a source, and would miss what it does not take.
        """
        names = {name for spec in destination.tensors for name, _ in holdings_of(spec, -1, -1)}
        parts, segments = [], []
        for source, table, found in zip(self._sources, self._tables, self._storages, strict=True):
            storages = sorted({storage for name in names for storage in found.get(name, ())})
            parts.append(_part_of(source, storages))
            segments.append(_segments_of(table, storages))
        mine = [own[which] for own, which in zip(sums, segments, strict=True)]
        plan = plan_read(destination, parts, mine, None, exact, cast)
        return _in_the_whole(plan, segments)


def _storages_by_name(source: Layout) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for storage, group in enumerate(source.storages):
        for tensor in group:
            for name, _ in holdings_of(source.tensors[tensor], -1, storage):
                found.setdefault(name, []).append(storage)
    return found


def _part_of(source: Layout, storages: Sequence[int]) -> Layout:
    """Return the layout of some storages alone; it is canonical because the whole is."""
    tensors = sorted(tensor for storage in storages for tensor in source.storages[storage])
    number = {tensor: position for position, tensor in enumerate(tensors)}
    groups = tuple(tuple(number[tensor] for tensor in source.storages[storage]) for storage in storages)
    return Layout(
        source.shard,
        source.num_shards,
        tuple(source.tensors[tensor] for tensor in tensors),
        groups,
        source.tag,
        source.segment_bytes,
        source.checksum,
    )


def _segments_of(table: SegmentTable, storages: Sequence[int]) -> _Ints:
    """Return the numbers that the segments of some storages have in the whole, i64 [segments of the part]."""
    runs = [np.arange(table.first[storage], table.first[storage + 1]) for storage in storages]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _in_the_whole(plan: ReadPlan, segments: Sequence[_Ints]) -> ReadPlan:
    """Number a plan's segments as the sources do."""
    segment, cuts = plan.segment.copy(), plan.cuts.segment.copy()
    of_cut = np.zeros(len(plan.cuts), np.int32)
    is_cut = plan.cut >= 0
    of_cut[plan.cut[is_cut]] = plan.source[is_cut]
    for source, numbers in enumerate(segments):
        segment[plan.source == source] = numbers[plan.segment[plan.source == source]]
        cuts[of_cut == source] = numbers[plan.cuts.segment[of_cut == source]]
    return dataclasses.replace(plan, segment=segment, cuts=dataclasses.replace(plan.cuts, segment=cuts))
