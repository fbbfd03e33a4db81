"""Compare how large logical tensors are with how large a reader knows them to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorhub_core.layout.checks import quote
from tensorhub_core.layout.holdings import holdings_of
from tensorhub_core.layout.regions import Point
from tensorhub_core.layout.types import Layout


def shape_differences(sources: Sequence[Layout], shapes: Mapping[str, Point]) -> list[str]:
    """Name every logical tensor that the sources together hold in another shape than `shapes` says.

    Boxes do not say how large the tensor is that they lie in: without this, a part of a larger model's tensor would
    pass for a smaller model's. `sources` are all shards of a replica.
    """
    reach: dict[str, set[Point]] = {}
    for number, layout in enumerate(sources):
        for spec in layout.tensors:
            for logical, holding in holdings_of(spec, number, 0):
                if logical in shapes:
                    reach.setdefault(logical, set()).add(holding.hi)
    differences = []
    for logical in sorted(reach):
        ends, expected = reach[logical], tuple(shapes[logical])
        ranks = {len(end) for end in ends}
        found = tuple(map(max, zip(*ends, strict=True))) if len(ranks) == 1 else max(ends, key=len)
        if found != expected:
            differences.append(f"shape of {quote(logical)}: expected {expected}, the version has {found}")
    return differences
