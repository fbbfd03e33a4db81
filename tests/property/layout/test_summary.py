"""What is said about a plan is what the plan does: bytes, places, runs, sources."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub_core.layout.canonical import dtype_bytes
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.summary import needed_bytes, reads_of, summarize
from tensorhub_core.layout.types import Layout
from tests.property.layout import strategies as draw_layout
from tests.property.layout.world import Bytes, execute, fill

POLICIES = (None, ExactPolicy(1, 1.0, 0), ExactPolicy(4, 0.5, 0))


def bytes_by_name(layout: Layout, buffers: list[Bytes]) -> dict[str, Bytes]:
    """Return each storage's bytes under the name of its first tensor."""
    return {layout.tensors[group[0]].name: buffer for group, buffer in zip(layout.storages, buffers, strict=True)}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(0, 2**32 - 1), st.sampled_from(POLICIES))
def test_a_summary_says_what_a_plan_does(data: st.DataObject, seed: int, policy: ExactPolicy | None) -> None:
    model = data.draw(draw_layout.logicals())
    sources = data.draw(draw_layout.sources(model, whole=True))
    wanted = data.draw(draw_layout.destinations(model))
    truth = draw_layout.contents(model, seed)
    memory = [fill(layout, truth, np.random.default_rng(seed)) for layout in sources]
    plan = plan_read(wanted, sources, exact=policy)
    told, rows = summarize(plan, wanted, sources), list(reads_of(plan, wanted, sources))

    right, writes = execute(plan, wanted, sources, memory)
    assert told.needed_bytes == sum(int(each.sum()) for each in writes)
    assert told.raw == plan.raw
    assert told.read_bytes == sum(row["run_bytes"] * row["count"] for row in rows) == int(plan.length_bytes.sum())
    assert (told.segments, told.cuts) == (int((plan.cut < 0).sum()), int((plan.cut >= 0).sum()))
    held = [bytes_by_name(*pair) for pair in zip(sources, memory, strict=True)]
    there = bytes_by_name(wanted, right)
    direct_bytes, staged = 0, [0]
    for read, row in enumerate(rows):
        at = row["offset_bytes"] + np.arange(row["count"])[:, None] * row["stride_bytes"] + np.arange(row["run_bytes"])
        got = held[int(plan.source[read])][row["tensor"]][at.reshape(-1)]
        if not row["direct"]:
            staged.append(len(got))
            continue
        direct_bytes += len(got)
        assert np.array_equal(there[row["to"]][row["to_offset_bytes"] : row["to_offset_bytes"] + len(got)], got)
    assert (told.direct_bytes, told.staged_bytes) == (direct_bytes, sum(staged))
    assert told.largest_staged_bytes == max(staged)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(POLICIES))
def test_runs_are_what_is_left_when_neighbours_are_joined(data: st.DataObject, policy: ExactPolicy | None) -> None:
    model = data.draw(draw_layout.logicals())
    sources = data.draw(draw_layout.sources(model, whole=True))
    wanted = data.draw(draw_layout.destinations(model))
    plan = plan_read(wanted, sources, exact=policy)
    told, rows = summarize(plan, wanted, sources), list(reads_of(plan, wanted, sources))
    by_shard: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_shard.setdefault(row["shard"], []).append(row)
    runs = 0
    for mine in by_shard.values():
        runs += sum(row["count"] for row in mine)
        for one, other in pairwise(mine):
            single = one["count"] == other["count"] == 1 and one["direct"] and other["direct"]
            touch_there = (one["tensor"], one["offset_bytes"] + one["run_bytes"]) == (
                other["tensor"],
                other["offset_bytes"],
            )
            touch_here = (one["to"], one["to_offset_bytes"] + one["run_bytes"]) == (
                other["to"],
                other["to_offset_bytes"],
            )
            runs -= single and touch_there and touch_here
    assert told.runs == runs == sum(each.runs for each in told.sources)
    assert told.read_bytes == sum(each.read_bytes for each in told.sources)
    assert len(plan) == sum(each.reads for each in told.sources)
    assert not plan.raw or len(told.sources) == 1


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_bytes_of_shared_storages_and_of_padding_are_counted_once_and_not_at_all(data: st.DataObject) -> None:
    model = data.draw(draw_layout.logicals())
    layout = data.draw(draw_layout.destinations(model))
    total = 0
    for group in layout.storages:
        spec = layout.tensors[group[0]]
        mask = np.full(spec.shape, spec.boxes is None)
        for box in spec.boxes or ():
            lead = len(spec.shape) - len(box.shape)
            size = (1,) * lead + box.shape if lead >= 0 else box.shape[-lead:]
            mask[tuple(slice(at, at + n) for at, n in zip(box.local_offset, size, strict=True))] = True
        total += int(mask.sum()) * dtype_bytes(spec.dtype)
    assert needed_bytes(layout) == total
