"""Keep plans: from version to version layouts stay what they are, and only the checksums are others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.casting import Cast
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.plan import Segments, casts_of, is_raw, plan_other, plan_read, policies_of
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout

KEPT_PLANS = 2
"""One that cuts, and one that does not; copies between equal layouts need no plan."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A plan, what it was made for, and the segments that were found to be equal: `ones[i]` and `others[i]`.

    `counts`: how many segments each source has.
    """

    destination: Layout
    sources: list[Layout]
    policies: Sequence[ExactPolicy | None]
    casts: Sequence[Cast]
    counts: list[int]
    plan: ReadPlan
    ones: Segments
    others: Segments

    def fits(
        self,
        destination: Layout,
        sources: Sequence[Layout],
        policies: Sequence[ExactPolicy | None],
        casts: Sequence[Cast],
    ) -> bool:
        """Tell whether it is a plan for these."""
        how = list(self.policies), list(self.casts)
        if len(self.sources) != len(sources) or how != (list(policies), list(casts)):
            return False
        pairs = zip((self.destination, *self.sources), (destination, *sources), strict=True)
        return all(one is other or one == other for one, other in pairs)

    def holds(self, sums: Sequence[NDArray[np.uint64]]) -> bool:
        """Tell whether what was found to be equal is so by these checksums as well."""
        flat = np.concatenate([np.zeros(0, np.uint64), *sums])
        return bool(np.array_equal(flat[self.ones], flat[self.others]))


class Planner:
    """Plan reads like `plan_read`, at no cost for layouts that were planned for lately. One thread at a time."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def plan(
        self,
        destination: Layout,
        sources: Sequence[Layout],
        sums: Sequence[NDArray[np.uint64]],
        table: SegmentTable | None = None,
        exact: ExactPolicy | Sequence[ExactPolicy | None] | None = None,
        cast: Cast | Sequence[Cast] = False,
    ) -> ReadPlan:
        """Return what `plan_read` returns, which may be the plan of an earlier call; raises what it raises."""
        if is_raw(destination, sources):
            return plan_read(destination, sources, sums, table)
        policies, casts = policies_of(exact, len(sources)), casts_of(cast, len(sources))
        found = next((kept for kept in self._kept if kept.fits(destination, sources, policies, casts)), None)
        if found is not None:
            self._kept.remove(found)
        # Wrong numbers of checksums, and bytes that should be equal and are not, are for the one who lists differences.
        counts = [len(each) for each in sums]
        if found is None or counts != found.counts or not found.holds(sums):
            plan, equal = plan_other(destination, sources, sums, policies, casts)
            found = _Kept(destination, list(sources), policies, casts, counts, plan, *equal)
        self._kept = [found, *self._kept[: KEPT_PLANS - 1]]
        return found.plan
