"""Planning a version part by part gives the plans that planning each part from all of the sources gives."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.excerpts import Excerpts
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Box, TensorSpec
from tests.property.layout import strategies as draw_layout
from tests.property.layout.world import execute, expected, fill, sums_of


def same(one: ReadPlan, other: ReadPlan) -> bool:
    arrays = ("source", "segment", "length_bytes", "direct", "storage", "offset_bytes", "cut")
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    cuts = all(np.array_equal(getattr(one.cuts, f.name), getattr(other.cuts, f.name)) for f in fields(one.cuts))
    scatters = dict(one.scatters.items()) == dict(other.scatters.items())
    return equal and cuts and scatters and (one.total_bytes, one.raw) == (other.total_bytes, other.raw)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1), st.sampled_from([None, ExactPolicy(1, 1.0, 0)]))
def test_a_part_is_planned_as_from_all(data: st.DataObject, seed: int, policy: ExactPolicy | None) -> None:
    model = data.draw(draw_layout.logicals())
    layouts = data.draw(draw_layout.sources(model, whole=True))
    truth = draw_layout.contents(model, seed)
    memory = [fill(layout, truth, np.random.default_rng(seed)) for layout in layouts]
    sums = [sums_of(layout, held) for layout, held in zip(layouts, memory, strict=True)]
    excerpts = Excerpts(layouts, [segment_table(layout) for layout in layouts])
    names = [each.name for each in model]
    cut = data.draw(st.integers(0, len(model)))
    for part in filter(None, (names[:cut], names[cut:])):
        specs = [
            TensorSpec(
                each.name,
                each.dtype,
                each.shape,
                (Box(each.name, (0,) * len(each.shape), each.shape, (0,) * len(each.shape)),),
            )
            for each in model
            if each.name in part
        ]
        destination = build_layout(specs, shard=0, num_shards=1)
        plan = excerpts.plan(destination, sums, [policy] * len(layouts))
        note(f"{destination}\n{layouts}\n{plan}")
        assert same(plan, plan_read(destination, layouts, sums, exact=policy))
        buffers, _ = execute(plan, destination, layouts, memory)
        assert all(map(np.array_equal, buffers, expected(destination, truth)))
    assert excerpts.are_of(layouts)
    assert not excerpts.are_of([*layouts, layouts[0]])
