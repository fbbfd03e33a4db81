"""Index where the logical tensors lie in the sources of a plan."""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import add

import msgspec

from tensorhub_core.layout.regions import Point
from tensorhub_core.layout.types import Layout, TensorSpec


class Holding(msgspec.Struct, frozen=True):
    """A region `lo` to `hi` of a logical tensor, held by a source's storage from `local` on (in elements of `spec`)."""

    source: int
    storage: int
    spec: TensorSpec
    lo: Point
    hi: Point
    local: Point


def holdings_of(spec: TensorSpec, source: int, storage: int) -> list[tuple[str, Holding]]:
    """Return the logical regions that one tensor holds, each with its logical name."""
    if spec.boxes is None:
        origin = (0,) * len(spec.shape)
        return [(spec.name, Holding(source, storage, spec, origin, spec.shape, origin))]
    return [
        (box.logical, Holding(source, storage, spec, box.offset, end_of(box.offset, box.shape), box.local_offset))
        for box in spec.boxes
    ]


def end_of(start: Point, shape: Point) -> Point:
    """Return the corner past the last."""
    return tuple(map(add, start, shape))


def is_plain(layout: Layout) -> bool:
    """Tell whether every tensor is the whole logical tensor of its own name."""
    return all(spec.boxes is None for spec in layout.tensors)


def index_sources(sources: Sequence[Layout], wanted: Container[str], own: int | None) -> dict[str, list[Holding]]:
    """Return the holdings of every wanted logical tensor, by source, storage and box.

    Where source `own` has a tensor, the other sources' are left out: shards of plain layouts that use the same names
    hold different bytes under them.
    """
    index: dict[str, list[Holding]] = {}
    for number, layout in enumerate(sources):
        for storage, group in enumerate(layout.storages):
            for tensor in group:
                for logical, holding in holdings_of(layout.tensors[tensor], number, storage):
                    if logical in wanted:
                        index.setdefault(logical, []).append(holding)
    if own is not None:
        for logical, found in index.items():
            index[logical] = [holding for holding in found if holding.source == own] or found
    return index
