"""A planner that keeps plans says what planning anew says, for other checksums and other layouts too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.planner import KEPT_PLANS, Planner
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import segment_table
from tests.property.layout import strategies as draw_layout
from tests.property.layout.world import fill, sums_of
from tests.unit.layout.shapes import columns, layout, rows, spec

ANY = ExactPolicy(1, 1.0, 0)


def same(one: ReadPlan, other: ReadPlan) -> bool:
    """Compare two plans, number by number."""
    arrays = ("source", "segment", "length_bytes", "direct", "storage", "offset_bytes", "cut")
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    return equal and (one.raw, one.total_bytes, dict(one.scatters)) == (
        other.raw,
        other.total_bytes,
        dict(other.scatters),
    )


def answer(make: Any, *args: Any) -> ReadPlan | tuple[str, ...]:
    """Return a plan, or the differences for which there is none."""
    try:
        plan: ReadPlan = make(*args)
    except LayoutMismatch as error:
        return error.differences or (str(error),)
    return plan


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1))
def test_a_kept_plan_is_the_plan(data: st.DataObject, seed: int) -> None:
    """Versions come with other bytes, now and then with bytes that contradict each other."""
    model = data.draw(draw_layout.logicals(most=2))
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(model))
    planner, plans = Planner(), []
    for version in range(3):
        rng = np.random.default_rng(seed + version)
        truth = draw_layout.contents(model, seed + version)
        sums = [sums_of(each, fill(each, truth, rng)) for each in layouts]
        if data.draw(st.booleans()) and sum(map(len, sums)):
            wrong = data.draw(st.sampled_from([number for number, each in enumerate(sums) if len(each)]))
            sums[wrong][data.draw(st.integers(0, len(sums[wrong]) - 1))] ^= np.uint64(1)
        exact = data.draw(st.sampled_from((None, ANY)))
        found, anew = (answer(make, destination, layouts, sums, None, exact) for make in (planner.plan, plan_read))
        assert isinstance(found, ReadPlan) == isinstance(anew, ReadPlan)
        if isinstance(found, ReadPlan) and isinstance(anew, ReadPlan):
            assert same(found, anew)
            plans.append(found)
        else:
            assert found == anew


def test_the_second_version_costs_no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, trainer = layout(columns("w", 6, 8, 2, 1)), [layout(rows("w", 6, 2, at, 8), at=(at, 2)) for at in range(2)]
    sums = [np.arange(len(segment_table(each)), dtype=np.uint64) for each in trainer]
    planner = Planner()
    plan = planner.plan(ours, trainer, sums, None, ANY)
    again = [layout(rows("w", 6, 2, at, 8), at=(at, 2)) for at in range(2)]
    assert planner.plan(ours, again, [each + np.uint64(1) for each in sums], None, ANY) is plan
    assert planner.plan(ours, trainer, sums) is not plan, "another policy, another plan"
    assert planner.plan(ours, trainer, sums, None, ANY) is plan
    for height in range(KEPT_PLANS):
        other = layout(spec("v", 3 + height, 8), segment_bytes=16)
        planner.plan(layout(spec("v", 3 + height, 8)), [other], [np.zeros(len(segment_table(other)), np.uint64)])
    assert planner.plan(ours, trainer, sums, None, ANY) is not plan, "old plans go"


def test_other_numbers_of_checksums_are_refused_by_a_kept_plan_too() -> None:
    ours, trainer = layout(columns("w", 6, 8, 2, 1)), layout(spec("w", 6, 8))
    sums = [np.zeros(len(segment_table(trainer)), np.uint64)]
    planner = Planner()
    planner.plan(ours, [trainer], sums)
    with pytest.raises(LayoutMismatch, match="checksums"):
        planner.plan(ours, [trainer], [sums[0][:-1]])
    planner.plan(ours, [trainer], sums)


def test_a_version_whose_copies_differ_is_refused_by_a_kept_plan_too() -> None:
    ours, trainer = layout(columns("w", 6, 8, 2, 1)), [layout(spec("w", 6, 8), at=(at, 2)) for at in range(2)]
    sums = [np.full(len(segment_table(each)), 7, np.uint64) for each in trainer]
    planner = Planner()
    plan = planner.plan(ours, trainer, sums)
    with pytest.raises(LayoutMismatch, match="copies"):
        planner.plan(ours, trainer, [sums[0], sums[1] + np.uint64(1)])
    assert planner.plan(ours, trainer, sums).total_bytes == plan.total_bytes
