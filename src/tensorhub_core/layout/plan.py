"""Plan how a destination is filled from the segments of its sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.assemble import assemble
from tensorhub_core.layout.casting import Cast
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.match import match
from tensorhub_core.layout.pieces import SourceTables
from tensorhub_core.layout.read_plan import ReadPlan, plan_raw
from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.segments import SegmentTable, segment_table
from tensorhub_core.layout.types import Layout

Segments = NDArray[np.int64]


def plan_read(
    destination: Layout,
    sources: Sequence[Layout],
    sums: Sequence[NDArray[np.uint64]] | None = None,
    table: SegmentTable | None = None,
    exact: ExactPolicy | Sequence[ExactPolicy | None] | None = None,
    cast: Cast | Sequence[Cast] = False,
) -> ReadPlan:
    """Plan how `destination` is filled from equal layouts or from the shards of a replica in other layouts.

    All layouts are valid (`build_layout`, `decode_layout`). `sums` u64 [segments] per source lets bytes that must be
    equal be compared before anything moves. Several sources of the destination's own layout each hold all of it: the
    plan is then `raw`, and any of them may be read. Elsewhere every box of the destination is proven to be covered,
    each point once. Whoever has the destination's `table` saves some milliseconds.

    `exact` says when parts of segments are read (for all sources, or for each); None = whole segments only, whose
    checksums everyone has. Which source gives which bytes does not depend on it. `cast` says which dtypes may be
    converted (for all sources, or for each). Raises LayoutMismatch listing all differences. Any thread.
    """
    if is_raw(destination, sources):
        table = segment_table(destination) if table is None else table
        _check_counts(sums, [len(table)] * len(sources))
        if sums is not None and any(not np.array_equal(sums[0], other) for other in sums[1:]):
            raise LayoutMismatch("the version's sources have one layout, but other bytes in it")
        return plan_raw(table)
    return plan_other(destination, sources, sums, policies_of(exact, len(sources)), casts_of(cast, len(sources)))[0]


def is_raw(destination: Layout, sources: Sequence[Layout]) -> bool:
    """Tell whether all layouts are one."""
    return bool(sources) and all(source is destination or source == destination for source in sources)


def policies_of(exact: ExactPolicy | Sequence[ExactPolicy | None] | None, sources: int) -> Sequence[ExactPolicy | None]:
    """Return what holds for each source."""
    return [exact] * sources if exact is None or isinstance(exact, ExactPolicy) else list(exact)


def casts_of(cast: Cast | Sequence[Cast], sources: int) -> Sequence[Cast]:
    """Return what holds for each source."""
    return [cast] * sources if isinstance(cast, bool | str) else list(cast)


def plan_other(
    destination: Layout,
    sources: Sequence[Layout],
    sums: Sequence[NDArray[np.uint64]] | None,
    policies: Sequence[ExactPolicy | None],
    casts: Sequence[Cast],
) -> tuple[ReadPlan, tuple[Segments, Segments]]:
    """Plan from other layouts; returns also the segments, numbered through all sources, that were found to be equal.

    Other checksums of the same layouts have the same plan exactly if those are equal again.
    """
    tables = SourceTables(sources, sums)
    _check_counts(sums, [len(table) for table in tables.tables])
    plan = assemble(match(destination, sources, tables, casts), tables, policies)
    none: Segments = np.zeros(0, np.int64)
    ones = np.concatenate([none, *(pair[0] for pair in tables.compared)])
    return plan, (ones, np.concatenate([none, *(pair[1] for pair in tables.compared)]))


def _check_counts(sums: Sequence[NDArray[np.uint64]] | None, segments: list[int]) -> None:
    if sums is not None and [len(each) for each in sums] != segments:
        raise LayoutMismatch("the version's checksums do not belong to its layouts: there are not as many as segments")


__all__ = ["ExactPolicy", "ReadPlan", "Scatter", "plan_raw", "plan_read"]
