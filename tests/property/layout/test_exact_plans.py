"""Plans that cut segments deliver the same bytes, read no more of them than they may, and nothing that is not cut."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tensorhub_core.client.exactness import carried_over
from tensorhub_core.layout.canonical import dtype_bytes
from tensorhub_core.layout.cuts import ExactPolicy, pack_cuts, unpack_cuts
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import segment_box, segment_table
from tensorhub_core.layout.types import Layout
from tests.property.layout import strategies as draw_layout
from tests.property.layout.world import boxes_of, execute, expected, fill, region, taken

Needs = dict[tuple[int, int], list[NDArray[np.bool_]]]
"""By source and segment: which of its bytes are needed, once for each place where they go."""


@st.composite
def policies(draw: st.DrawFn) -> ExactPolicy:
    """Draw when to cut: anything, now and then only long runs, or only of large segments."""
    return ExactPolicy(
        draw(st.sampled_from((0, 1, 1, 4, 12, 64))),
        draw(st.sampled_from((1.0, 0.75, 0.3))),
        draw(st.sampled_from((0, 0, 0, 50))),
    )


def needs_of(whole: ReadPlan, sources: list[Layout]) -> Needs:
    """Take apart a plan of whole segments, which other tests compare with numpy."""
    tables, needs = [segment_table(layout) for layout in sources], {}
    for read in range(len(whole)):
        source, index = int(whole.source[read]), int(whole.segment[read])
        segment = segment_box(sources[source], tables[source], index)
        spec = sources[source].tensors[sources[source].storages[segment.storage][0]]
        masks = [np.ones(segment.length_bytes, np.bool_)] if whole.direct[read] else []
        for scatter in whole.scatters.get(read, ()):
            mask = np.zeros((*segment.shape, dtype_bytes(spec.dtype)), np.uint8)
            lead = len(segment.shape) - len(scatter.shape)
            shape = (1,) * lead + scatter.shape if lead >= 0 else scatter.shape[-lead:]
            region(mask, scatter.src_start, shape)[...] = 1
            masks.append(mask.reshape(-1) == 1)
        needs[source, index] = masks
    return needs


def runs_of(mask: NDArray[np.bool_]) -> tuple[list[int], set[int]]:
    """Return the begins of the runs that are needed, and their lengths."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return edges[::2].tolist(), set((edges[1::2] - edges[::2]).tolist())


def has_two_levels(mask: NDArray[np.bool_], least_run: int) -> bool:
    begins, lengths = runs_of(mask)
    return len(begins) == 1 or (len(set(np.diff(begins))) == 1 and len(lengths) == 1 and min(lengths) >= least_run)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1), policies())
def test_exact_plans_rebuild_what_slicing_rebuilds_from_no_more_bytes_than_they_may_read(
    data: st.DataObject, seed: int, policy: ExactPolicy
) -> None:
    model = data.draw(draw_layout.logicals())
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(model))
    truth = draw_layout.contents(model, seed)
    memory = [fill(layout, truth, np.random.default_rng(seed)) for layout in layouts]
    whole, plan = plan_read(destination, layouts), plan_read(destination, layouts, exact=policy)
    note(f"{destination}\n{layouts}\n{plan}")
    assert plan.raw == whole.raw
    if plan.raw:
        assert (plan.cut == -1).all()
        return
    buffers, writes = execute(plan, destination, layouts, memory)
    assert all(map(np.array_equal, buffers, expected(destination, truth)))
    assert max((int(count.max()) for count in writes if len(count)), default=0) <= 1
    places = list(zip(plan.storage.tolist(), plan.offset_bytes.tolist(), strict=True))
    assert places == sorted(places)
    assert sorted(plan.scatters) == np.flatnonzero(~plan.direct).tolist()
    assert plan.total_bytes == plan.length_bytes.sum() <= whole.total_bytes
    check_bytes(plan, needs_of(whole, layouts), layouts, policy)
    check_cuts(plan, layouts)


def check_bytes(plan: ReadPlan, needs: Needs, layouts: list[Layout], policy: ExactPolicy) -> None:
    """Check what is read of every segment."""
    tables = [segment_table(layout) for layout in layouts]
    reads = defaultdict(list)
    for read in range(len(plan)):
        source, index = int(plan.source[read]), int(plan.segment[read])
        reads[source, index].append(read)
    assert reads.keys() == needs.keys()
    for (source, index), mine in reads.items():
        segment = segment_box(layouts[source], tables[source], index)
        count = np.zeros(segment.length_bytes, np.int64)
        for read in mine:
            count[taken(plan, read, segment)] += 1
        masks = needs[source, index]
        needed = np.any(masks, axis=0)
        assert count[needed].all(), "what is needed is read"
        if (plan.cut[mine] < 0).any():
            assert len(mine) == 1, "a whole segment is read once"
        else:
            assert len(mine) in (1, len(masks))
            assert count.sum() <= policy.max_share * segment.length_bytes
            assert segment.length_bytes >= policy.min_segment_bytes
        for read in mine:
            cut = int(plan.cut[read])
            if cut >= 0 and plan.cuts.count[cut] > 1 and plan.cuts.run_bytes[cut] < policy.min_run_bytes:
                cost_bytes = plan.length_bytes[read] + plan.cuts.count[cut] * policy.min_run_bytes
                assert cost_bytes <= policy.max_share * segment.length_bytes
        small = segment.length_bytes < policy.min_segment_bytes or needed.sum() > policy.max_share * len(needed)
        if not small and len(masks) == 1 and has_two_levels(masks[0], policy.min_run_bytes):
            assert np.array_equal(count, needed), "two levels are read exactly"


def check_cuts(plan: ReadPlan, layouts: list[Layout]) -> None:
    """Check that the cuts of all sources are numbered as they say, and pass as a stranger's."""
    cut = plan.cut[plan.cut >= 0]
    assert cut.tolist() == list(range(len(plan.cuts)))
    for source, layout in enumerate(layouts):
        mine = plan.cuts_of(source)
        reads = np.flatnonzero((plan.source == source) & (plan.cut >= 0))
        assert mine.segment.tolist() == plan.segment[reads].tolist()
        assert mine.length_bytes.tolist() == plan.length_bytes[reads].tolist()
        again = unpack_cuts(pack_cuts(mine), segment_table(layout))
        assert np.array_equal(again.offset_bytes, mine.offset_bytes)
    assert sum(len(plan.cuts_of(source)) for source in range(len(layouts))) == len(plan.cuts)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1))
def test_what_one_plan_has_read_another_need_not_read_again(data: st.DataObject, seed: int) -> None:
    model = data.draw(draw_layout.logicals())
    layouts = data.draw(draw_layout.sources(model, whole=True))
    destination = data.draw(draw_layout.destinations(model))
    drawn = [data.draw(st.lists(st.none() | policies(), min_size=len(layouts), max_size=len(layouts))) for _ in "ab"]
    before, now = (plan_read(destination, layouts, exact=exact) for exact in drawn)
    verified = np.array(data.draw(st.lists(st.booleans(), min_size=len(before), max_size=len(before))), np.bool_)
    done = carried_over(before, verified, now)
    assert len(done) == len(now)
    assert carried_over(before, np.ones(len(before), np.bool_), now).all(), "all of it is all of it"
    if before.raw:
        return
    truth = draw_layout.contents(model, seed)
    memory = [fill(layout, truth, np.random.default_rng(seed)) for layout in layouts]
    marks = [marked(*pair, destination, layouts, memory) for pair in ((before, verified), (now, ~done))]
    for buffer, (first, second) in enumerate(zip(*marks, strict=True)):
        spec = destination.tensors[destination.storages[buffer][0]]
        inside = np.zeros((*spec.shape, dtype_bytes(spec.dtype)), np.uint8)
        for box in boxes_of(spec):
            region(inside, box.local_offset, (1,) * (len(spec.shape) - len(box.shape)) + box.shape)[...] = 1
        assert np.array_equal(first | second, inside.reshape(-1) == 1), "both together fill everything"


def marked(
    plan: ReadPlan, which: NDArray[np.bool_], destination: Layout, layouts: list[Layout], memory: list
) -> list[NDArray[np.bool_]]:
    """Return which bytes of the destination some reads of a plan fill."""
    keep = np.flatnonzero(which).tolist()
    order = {read: number for number, read in enumerate(keep)}
    part = ReadPlan(
        False,
        plan.source[keep],
        plan.segment[keep],
        plan.length_bytes[keep],
        plan.direct[keep],
        plan.storage[keep],
        plan.offset_bytes[keep],
        {order[read]: scatters for read, scatters in plan.scatters.items() if read in order},
        0,
        plan.cut[keep],
        plan.cuts,
    )
    return [count > 0 for count in execute(part, destination, layouts, memory)[1]]
