"""Choose which source delivers which part of a region, and prove that the parts make up the whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import sub

import numpy as np

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.holdings import Holding
from tensorhub_core.layout.regions import Region, intersect, is_empty, subtract

MAX_STEPS = 1 << 22
"""Intersections that one plan may take: several times what real models need, a few seconds for hostile ones."""

_MANY = 32


class Cover:
    """Cover regions by holdings, each point once, spreading replicated regions over the sources.

    The source with the fewest bytes so far is taken; among equals, the one that follows the destination's own shard,
    so that the shards of a destination begin at different sources.
    """

    def __init__(self, num_sources: int, shard: int) -> None:
        self._load = [0] * num_sources
        self._turn = [(number - shard) % num_sources for number in range(num_sources)]
        self._steps_left = MAX_STEPS

    def find(
        self, need: Region, holdings: Sequence[Holding], item_bytes: int
    ) -> tuple[list[tuple[Holding, Region]], list[Region]]:
        """Return disjoint parts of `need`, each with the holding it comes from, and the regions that nobody holds."""
        if is_empty(*need):
            return [], []
        parts: list[tuple[Holding, Region]] = []
        open_regions = [need]
        for holding in self._by_preference(need, holdings):
            left: list[Region] = []
            self._spend(len(open_regions))
            for region in open_regions:
                common = intersect(region, (holding.lo, holding.hi))
                if common is None:
                    left.append(region)
                    continue
                parts.append((holding, common))
                self._load[holding.source] += _points(common) * item_bytes
                left.extend(subtract(region, common))
            open_regions = left
            if not open_regions:
                break
        return parts, open_regions

    def pick(self, holdings: Sequence[Holding], size_bytes: int) -> Holding:
        """Return one of several holdings of the same region, all of which is needed."""
        chosen = holdings[0]
        if len(holdings) > 1:
            chosen = min(holdings, key=lambda holding: (self._load[holding.source], self._turn[holding.source]))
        self._load[chosen.source] += size_bytes
        return chosen

    def _by_preference(self, need: Region, holdings: Sequence[Holding]) -> Sequence[Holding]:
        if len(holdings) == 1:
            return holdings
        if len(holdings) > _MANY:
            holdings = self._near(need, holdings)
        self._spend(len(holdings))
        found: list[tuple[int, int, int, int]] = []
        for number, holding in enumerate(holdings):
            common = intersect(need, (holding.lo, holding.hi))
            if common is not None:
                source = holding.source
                found.append((-_points(common), self._load[source], self._turn[source], number))
        found.sort()
        return [holdings[number] for *_, number in found]

    def _near(self, need: Region, holdings: Sequence[Holding]) -> Sequence[Holding]:
        self._spend(len(holdings) // 4)
        lo = np.array([holding.lo for holding in holdings], np.int64)
        hi = np.array([holding.hi for holding in holdings], np.int64)
        hit = ((lo < np.array(need[1], np.int64)) & (np.array(need[0], np.int64) < hi)).all(axis=1)
        return [holdings[number] for number in np.flatnonzero(hit).tolist()]

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise LayoutMismatch("the layouts are cut into too many small boxes to be matched")


def _points(region: Region) -> int:
    return prod(map(sub, region[1], region[0]))
