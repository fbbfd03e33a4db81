"""A plan rebuilds what numpy slicing rebuilds, or is refused for exactly what the sources lack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.canonical import build_layout, dtype_bytes
from tensorhub_core.layout.plan import ReadPlan, plan_read
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Layout, TensorSpec
from tests.property.layout import strategies as draw_layout
from tests.property.layout.world import SENTINEL, boxes_of, execute, expected, fill, region, sums_of


def held_points(model: list[draw_layout.Logical], layouts: list[Layout]) -> dict[str, NDArray[np.bool_]]:
    """Mark, element by element, what the layouts hold."""
    points = {each.name: np.zeros((*each.shape, 1), np.uint8) for each in model}
    for layout in layouts:
        for spec in layout.tensors:
            for box in boxes_of(spec):
                region(points[box.logical], box.offset, box.shape)[...] = 1
    return {name: marks[..., 0] == 1 for name, marks in points.items()}


def is_plain(layout: Layout) -> bool:
    """Tell whether a layout has no boxes."""
    return all(spec.boxes is None for spec in layout.tensors)


def check_shape(plan: ReadPlan, sources: list[Layout]) -> None:
    """Check what every plan promises, whatever it moves."""
    keys = list(zip(plan.source.tolist(), plan.segment.tolist(), strict=True))
    assert len(set(keys)) == len(keys), "a segment is read twice"
    places = list(zip(plan.storage.tolist(), plan.offset_bytes.tolist(), strict=True))
    assert places == sorted(places), "reads are not in canonical order"
    assert sorted(plan.scatters) == np.flatnonzero(~plan.direct).tolist()
    assert plan.total_bytes == plan.length_bytes.sum()
    tables = [segment_table(layout) for layout in sources]
    assert all(index < len(tables[source]) for source, index in keys)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1), st.booleans())
def test_plan_rebuilds_what_slicing_rebuilds(data: st.DataObject, seed: int, with_sums: bool) -> None:
    model = data.draw(draw_layout.logicals())
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(model))
    truth = draw_layout.contents(model, seed)
    rng = np.random.default_rng(seed + 1)
    memory = [fill(layout, truth, rng) for layout in layouts]
    sums = [sums_of(*pair) for pair in zip(layouts, memory, strict=True)]
    plan = plan_read(destination, layouts, sums if with_sums else None)
    buffers, writes = execute(plan, destination, layouts, memory)
    note(f"{destination}\n{layouts}\n{plan}")
    if plan.raw:
        assert all(map(np.array_equal, buffers, memory[0]))
        assert all((count == 1).all() for count in writes)
        return
    check_shape(plan, layouts)
    assert all(map(np.array_equal, buffers, expected(destination, truth)))
    for spec, count in zip((destination.tensors[g[0]] for g in destination.storages), writes, strict=True):
        inside = np.zeros((*spec.shape, dtype_bytes(spec.dtype)), np.uint8)
        for box in boxes_of(spec):
            lead = (1,) * (len(spec.shape) - len(box.shape))
            region(inside, box.local_offset, lead + box.shape)[...] = 1
        assert np.array_equal(count, inside.reshape(-1)), "a byte is not written once, or padding is written"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_plan_is_refused_exactly_where_points_lack(data: st.DataObject) -> None:
    model = data.draw(draw_layout.logicals(most=4))
    layouts = data.draw(draw_layout.sources(model, whole=False))
    destination = data.draw(draw_layout.destinations(model))
    held = held_points(model, layouts)
    known = {box.logical for layout in layouts for spec in layout.tensors for box in boxes_of(spec)}
    lacking: set[str] = set()
    for spec in destination.tensors:
        for box in boxes_of(spec):
            need = held[box.logical][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
            if box.logical not in known or not need.all():
                lacking.add(box.logical)
    if not lacking:
        plan = plan_read(destination, layouts)
        assert plan.raw or sorted(plan.scatters) == np.flatnonzero(~plan.direct).tolist()
        return
    with pytest.raises(LayoutMismatch) as caught:
        plan_read(destination, layouts)
    differences = caught.value.differences
    named = {name for name in held for line in differences if f"'{name}'" in line}
    assert lacking <= named
    assert not {line.split()[0] for line in differences} - {"gap", "missing:", "extra:", "shape"}
    assert all(line in str(caught.value) for line in differences)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1))
def test_two_hops_through_different_layouts_lose_nothing(data: st.DataObject, seed: int) -> None:
    """Trainer -> engine -> trainer: what a destination holds serves as a source of the same bytes."""
    model = data.draw(draw_layout.logicals(most=2))
    truth = draw_layout.contents(model, seed)
    first = data.draw(draw_layout.sources(model, whole=True))
    middle = data.draw(draw_layout.sources(model, whole=True))
    rng = np.random.default_rng(seed)
    memory = [fill(layout, truth, rng) for layout in first]
    # Shards of plain layouts take all of what their counterpart has: between them, tensors cannot change places.
    assume(len(first) != len(middle) or not (all(map(is_plain, first)) and any(map(is_plain, middle))))
    plans = [plan_read(layout, first) for layout in middle]
    arrived = [execute(plan, layout, first, memory)[0] for plan, layout in zip(plans, middle, strict=True)]
    last = data.draw(draw_layout.destinations(model))
    plan = plan_read(last, middle)
    buffers, _ = execute(plan, last, middle, arrived)
    if not plan.raw:
        assert all(map(np.array_equal, buffers, expected(last, truth)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1))
def test_padding_is_never_needed(data: st.DataObject, seed: int) -> None:
    """Whatever the padding of the sources holds, the destination gets the same bytes."""
    model = data.draw(draw_layout.logicals(most=2))
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(model))
    truth = draw_layout.contents(model, seed)
    plan = plan_read(destination, layouts)
    if plan.raw:
        return
    results = []
    for noise in (1, 2):
        memory = [fill(layout, truth, np.random.default_rng(noise)) for layout in layouts]
        results.append(execute(plan, destination, layouts, memory)[0])
    assert all(map(np.array_equal, *results))
    untouched = [np.full_like(buffer, SENTINEL) for buffer in results[0]]
    assert len(plan) or all(map(np.array_equal, results[0], untouched))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1))
def test_second_names_of_the_same_regions_change_nothing(data: st.DataObject, seed: int) -> None:
    """Whichever shards the regions come from, and whatever lies beside them there."""
    model = data.draw(draw_layout.logicals())
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(model))
    truth = draw_layout.contents(model, seed)
    memory = [fill(layout, truth, np.random.default_rng([seed, n])) for n, layout in enumerate(layouts)]
    sums = [sums_of(*pair) for pair in zip(layouts, memory, strict=True)]
    twins = [TensorSpec(f"{spec.name} too", spec.dtype, spec.shape, boxes_of(spec)) for spec in destination.tensors]
    pairs = [(spec.name, f"{spec.name} too") for spec in destination.tensors]
    both = build_layout(
        (*destination.tensors, *twins),
        pairs,
        shard=destination.shard,
        num_shards=destination.num_shards,
        segment_bytes=destination.segment_bytes,
    )
    plan = plan_read(both, layouts, sums)
    buffers, writes = execute(plan, both, layouts, memory)
    assert max((int(count.max()) for count in writes if len(count)), default=0) <= 1
    assert all(map(np.array_equal, buffers, expected(both, truth)))
