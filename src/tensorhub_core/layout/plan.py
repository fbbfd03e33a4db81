"""Plan how a destination is filled from the segments of its sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.assemble import assemble
from tensorhub_core.layout.match import match
from tensorhub_core.layout.pieces import SourceTables
from tensorhub_core.layout.read_plan import ReadPlan, plan_raw
from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.types import Layout


def plan_read(
    destination: Layout, sources: Sequence[Layout], sums: Sequence[NDArray[np.uint64]] | None = None
) -> ReadPlan:
    """Plan how `destination` is filled from one equal layout or from the shards of a replica in other layouts.

    All layouts are valid (`build_layout`, `decode_layout`). `sums` u64 [segments] per source lets bytes that must be
    equal be compared before anything moves. Every box of the destination is proven to be covered, each point once.
    Raises LayoutMismatch listing all differences. Any thread.
    """
    tables = SourceTables(sources, sums)
    if sums is not None and [len(each) for each in sums] != [len(table) for table in tables.tables]:
        raise LayoutMismatch("the version's checksums do not belong to its layouts: there are not as many as segments")
    if len(sources) == 1 and sources[0] == destination:
        return plan_raw(tables.tables[0])
    return assemble(match(destination, sources, tables), tables)


__all__ = ["ReadPlan", "Scatter", "plan_raw", "plan_read"]
