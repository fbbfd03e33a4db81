"""How many segments of a destination are complete after some reads of its plan: compared with the bytes themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub_core.client.progressive import complete_segments
from tensorhub_core.layout.canonical import dtype_bytes
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.read_plan import ReadPlan, shape_of_read
from tensorhub_core.layout.scatter import scatter_bytes
from tensorhub_core.layout.segments import segment_box, segment_table
from tensorhub_core.layout.types import Layout
from tests.property.layout import strategies as draw_layout
from tests.property.layout.test_exact_plans import policies
from tests.property.layout.world import empty


def first_touched(plan: ReadPlan, destination: Layout, sources: list[Layout]) -> list[int]:
    """Return the first segment of the destination that each read brings anything for."""
    table, tables = segment_table(destination), [segment_table(layout) for layout in sources]
    found = []
    for read in range(len(plan)):
        buffers = [np.zeros_like(buffer) for buffer in empty(destination)]
        length = int(plan.length_bytes[read])
        if plan.direct[read]:
            offset = int(plan.offset_bytes[read])
            buffers[plan.storage[read]][offset : offset + length] = 1
        else:
            source = int(plan.source[read])
            layout = sources[source]
            segment = segment_box(layout, tables[source], int(plan.segment[read]))
            item = dtype_bytes(layout.tensors[layout.storages[segment.storage][0]].dtype)
            shape = shape_of_read(plan, read, segment.shape, item)
            for scatter in plan.scatters[read]:
                into = destination.tensors[destination.storages[scatter.storage][0]].shape
                scatter_bytes(np.ones(length, np.uint8), shape, scatter, buffers[scatter.storage], into, item)
        runs = zip(table.storage.tolist(), table.offset_bytes.tolist(), table.length_bytes.tolist(), strict=True)
        found.append(next(n for n, (s, a, size) in enumerate(runs) if buffers[s][a : a + size].any()))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), policies(), st.booleans())
def test_segments_are_complete_when_no_read_that_is_missing_brings_anything_for_them(
    data: st.DataObject, policy: object, cuts: bool
) -> None:
    model = data.draw(draw_layout.logicals())
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(model))
    plan = plan_read(destination, layouts, exact=policy if cuts else None)  # type: ignore[arg-type]
    table = segment_table(destination)
    touched = first_touched(plan, destination, layouts)
    expected = [min(touched[reads:], default=len(table)) for reads in range(len(plan) + 1)]
    assert complete_segments(plan, table).tolist() == expected
