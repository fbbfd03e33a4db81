"""What plans do with shards, replicas, padding and expert axes; bytes are compared with numpy slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout import assemble, cover
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.segments import segment_box, segment_table
from tensorhub_core.layout.types import Box, Layout, TensorSpec
from tests.unit.layout.shapes import columns, layout, moved, rows, spec, truth


@pytest.mark.parametrize("tag", ["", "packed"])
def test_equal_layouts_copy_raw(tag: str) -> None:
    both = layout(spec("a", 40), spec("b"), spec("e", 0, 16), at=(1, 2), tag=tag, segment_bytes=32)
    plan = plan_read(both, [both])
    table = segment_table(both)
    assert plan.raw
    assert plan.direct.all()
    assert not plan.scatters
    assert plan.segment.tolist() == list(range(len(table)))
    assert (plan.length_bytes is table.length_bytes) or np.array_equal(plan.length_bytes, table.length_bytes)
    assert np.array_equal(plan.offset_bytes, table.offset_bytes)
    assert plan.total_bytes == 82


def test_sixty_thousand_tensors_are_planned_as_arrays() -> None:
    specs = [spec(f"model.layers.{n}.weight", 1 + n % 64, dtype="uint8") for n in range(60_000)]
    ours = layout(*specs)
    raw = plan_read(ours, [layout(*specs)])
    assert (raw.raw, len(raw), len(raw.scatters)) == (True, 60_000, 0)
    other = plan_read(ours, [layout(*specs, segment_bytes=1 << 10)])
    assert (other.raw, len(other), len(other.scatters)) == (False, 60_000, 0)
    assert other.direct.all()
    assert np.array_equal(other.storage, np.arange(60_000))


def test_checksums_of_another_layout_are_refused() -> None:
    both = layout(spec("a", 40))
    for sums in ([], [np.zeros(2, np.uint64)], [np.zeros(1, np.uint64)] * 2):
        with pytest.raises(LayoutMismatch, match="checksums"):
            plan_read(both, [both], sums)


def test_several_sources_of_the_same_layout_are_one_raw_copy() -> None:
    ours = layout(spec("a", 40), spec("b", 3, 7), segment_bytes=32)
    sums = np.arange(len(segment_table(ours)), dtype=np.uint64)
    plan = plan_read(ours, [ours, layout(spec("a", 40), spec("b", 3, 7), segment_bytes=32), ours], [sums] * 3)
    alone = plan_read(ours, [ours], [sums], segment_table(ours))
    assert plan.raw
    assert plan.segment.tolist() == alone.segment.tolist() == list(range(len(sums)))
    assert plan.total_bytes == alone.total_bytes == 2 * (40 + 21)
    with pytest.raises(LayoutMismatch, match="other bytes"):
        plan_read(ours, [ours, ours], [sums, sums + np.uint64(1)])
    with pytest.raises(LayoutMismatch, match="checksums"):
        plan_read(ours, [ours, ours], [sums, sums[:-1]])


def test_row_shards_land_in_place() -> None:
    sources = [layout(rows("w", 64, 4, r, 8), at=(r, 4), segment_bytes=64) for r in range(4)]
    plan = moved(layout(spec("w", 64, 8)), sources, truth(w=(64, 8)))
    assert plan.direct.all()
    assert plan.total_bytes == 64 * 8 * 2


@pytest.mark.parametrize(("parts", "wanted"), [(2, 4), (4, 2), (1, 4), (4, 1), (3, 2)])
def test_column_shards_are_scattered(parts: int, wanted: int) -> None:
    sources = [layout(columns("w", 12, 24, parts, r), at=(r, parts), segment_bytes=48) for r in range(parts)]
    for index in range(wanted):
        plan = moved(layout(columns("w", 12, 24, wanted, index), at=(index, wanted)), sources, truth(w=(12, 24)))
        assert not plan.direct.any()


def qkv(index: int, count: int, *, heads: int, groups: int, interleaved: bool) -> TensorSpec:
    """Describe a fused attention projection: [q; k; v] of an engine, or per query group as Megatron has it."""
    mine = range(index * groups // count, max(index * groups // count + 1, (index + 1) * groups // count))
    per_group = heads // groups if count <= groups else heads // count
    first_q = mine[0] * (heads // groups) if count <= groups else index * per_group
    boxes: list[Box] = []
    if interleaved:
        for n, group in enumerate(mine):
            base = n * (per_group + 2)
            boxes.append(Box("q", (group * per_group, 0), (per_group, 4), (base, 0)))
            boxes.append(Box("k", (group, 0), (1, 4), (base + per_group, 0)))
            boxes.append(Box("v", (group, 0), (1, 4), (base + per_group + 1, 0)))
    else:
        q_rows = per_group * len(mine)
        boxes.append(Box("q", (first_q, 0), (q_rows, 4), (0, 0)))
        boxes.append(Box("k", (mine[0], 0), (len(mine), 4), (q_rows, 0)))
        boxes.append(Box("v", (mine[0], 0), (len(mine), 4), (q_rows + len(mine), 0)))
    return spec("qkv", sum(box.shape[0] for box in boxes), 4, boxes=boxes)


@pytest.mark.parametrize("wanted", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_interleaved_and_fused_attention(parts: int, wanted: int) -> None:
    """With 8 ranks and 4 KV heads, each KV head is replicated on two ranks."""
    values = truth(q=(16, 4), k=(4, 4), v=(4, 4))
    sources = [
        layout(qkv(r, parts, heads=16, groups=4, interleaved=True), at=(r, parts), segment_bytes=24)
        for r in range(parts)
    ]
    for index in range(wanted):
        moved(layout(qkv(index, wanted, heads=16, groups=4, interleaved=False), at=(index, wanted)), sources, values)


def test_replicated_kv_heads_are_read_once_and_from_all_replicas() -> None:
    values = truth(q=(16, 4), k=(4, 4), v=(4, 4))
    sources = [layout(qkv(r, 8, heads=16, groups=4, interleaved=False), at=(r, 8), segment_bytes=16) for r in range(8)]
    plan = moved(layout(qkv(0, 1, heads=16, groups=4, interleaved=False)), sources, values)
    assert plan.total_bytes <= (16 + 4 + 4) * 4 * 2 * 1.5


@pytest.mark.parametrize("boxed", [False, True])
def test_copies_spread_over_sources_and_repeat_exactly(boxed: bool) -> None:
    specs = [rows(f"norm{n:02}", 8, 1, 0) if boxed else spec(f"norm{n:02}", 8) for n in range(40)]
    sources = [layout(*specs, at=(r, 4)) for r in range(4)]
    begin: list[int] = []
    for index in range(2):
        reader = layout(*specs, spec("x", 0), at=(index, 2))
        sources_of = [layout(*specs, spec("x", 0), at=(r, 4)) for r in range(4)]
        plans = [plan_read(reader, sources_of) for _ in range(2)]
        assert np.array_equal(plans[0].source, plans[1].source)
        assert np.bincount(plans[0].source).tolist() == [10] * 4
        begin.append(int(plans[0].source[0]))
    assert begin == [0, 1]
    assert len(plan_read(layout(*specs), sources)) == 40


def test_experts_under_a_new_axis() -> None:
    """A fused [expert, 2 * ffn, hidden] tensor of an engine holds 2-d tensors; expert numbers are global ones."""
    names = [f"experts.{e}.{kind}" for e in range(4) for kind in ("gate", "up")]
    values = truth(**{name: (6, 4) for name in names})

    def fused(local: Sequence[int], shard: int, at: tuple[int, int]) -> Layout:
        part = 6 // at[1]
        boxes = [
            Box(f"experts.{e}.{kind}", (shard * part, 0), (part, 4), (n, k * part, 0))
            for n, e in enumerate(local)
            for k, kind in enumerate(("gate", "up"))
        ]
        return layout(spec("w13", len(local), 2 * part, 4, boxes=boxes), at=at, segment_bytes=40)

    single = layout(*(spec(name, 6, 4) for name in names))
    moved(fused([2, 3], 0, (0, 1)), [single], values)
    shards = [fused([3, 1, 0, 2], r, (r, 2)) for r in range(2)]
    moved(single, shards, values)
    moved(fused([1, 0, 3, 2], 2, (2, 3)), shards, values)


def test_a_stacked_logical_tensor_on_single_experts() -> None:
    """Logical [expert, ffn, hidden], physical one 2-d tensor per expert: the leading axis of the box is dropped."""
    values = truth(w=(3, 4, 5))
    single = [spec(f"e{e}", 4, 5, boxes=[Box("w", (e, 0, 0), (1, 4, 5), (0, 0))]) for e in range(3)]
    moved(layout(spec("w", 3, 4, 5)), [layout(*single, segment_bytes=16)], values)
    moved(layout(*single), [layout(spec("w", 3, 4, 5), segment_bytes=64)], values)


@pytest.mark.parametrize("padded", ["source", "destination", "both"])
def test_vocab_padding_stays_where_it_is(padded: str) -> None:
    values = truth(embed=(10, 4))
    boxed = spec("vocab", 16, 4, boxes=[Box("embed", (0, 0), (10, 4), (0, 0))])
    plain = spec("embed", 10, 4)
    here = layout(boxed if padded != "source" else plain, segment_bytes=32)
    there = layout(boxed if padded != "destination" else plain, segment_bytes=48)
    plan = moved(here, [there], values)
    # The source's last segments hold padding only: they are not read.
    assert plan.total_bytes < 16 * 4 * 2 or padded == "destination"


def test_empty_and_scalar_tensors() -> None:
    values = truth(empty=(0, 16), scalar=(), one=(1,))
    specs = [spec("empty", 0, 16), spec("scalar"), spec("one", 1)]
    plan = moved(layout(*specs), [layout(*specs, segment_bytes=64)], values)
    assert plan.length_bytes.tolist() == [2, 2]
    assert len(plan_read(layout(), [layout(segment_bytes=64)])) == 0


def test_a_segment_that_two_tensors_need_is_read_once() -> None:
    values = truth(w=(32, 4))
    twice = [spec(f"copy{n}", 32, 4, boxes=[Box("w", (0, 0), (32, 4), (0, 0))]) for n in range(2)]
    plan = moved(layout(*twice), [layout(spec("w", 32, 4), segment_bytes=64)], values)
    assert plan.total_bytes == 32 * 4 * 2
    assert not plan.direct.any()
    assert [len(each) for each in plan.scatters.values()] == [2] * 4


def test_layouts_cut_to_pieces_are_refused_in_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Box("w", (n, m), (1, 1), (n, m)) for n in range(32) for m in range(32)]
    shredded = layout(spec("w32", 32, 32, boxes=cells))
    whole = layout(spec("w", 32, 32))
    moved(whole, [shredded], truth(w=(32, 32)))
    monkeypatch.setattr(assemble, "MAX_LANDINGS", 1000)
    with pytest.raises(LayoutMismatch, match="cut too finely"):
        plan_read(whole, [shredded])
    monkeypatch.setattr(cover, "MAX_STEPS", 1000)
    with pytest.raises(LayoutMismatch, match="too many small boxes"):
        plan_read(whole, [shredded])


def test_there_is_no_segment_beyond_the_last() -> None:
    ours = layout(spec("a", 40), segment_bytes=32)
    table = segment_table(ours)
    assert segment_box(ours, table, 2).length_bytes == 16
    for index in (3, -1):
        with pytest.raises(IndexError):
            segment_box(ours, table, index)
