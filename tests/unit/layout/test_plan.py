"""What plans do with ties, replicas, padding, expert axes and differences; bytes are compared with numpy slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout import assemble, cover
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.plan import ReadPlan, plan_read
from tensorhub_core.layout.segments import segment_box, segment_table
from tensorhub_core.layout.types import Box, Layout, TensorSpec
from tests.property.layout.world import Bytes, execute, expected, fill, logical_tensor, sums_of

DTYPE = "bfloat16"


def spec(name: str, *shape: int, boxes: Sequence[Box] | None = None, dtype: str = DTYPE) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(name, dtype, shape, None if boxes is None else tuple(boxes))


def layout(*specs: TensorSpec, at: tuple[int, int] = (0, 1), tied: Sequence[str] = (), **more: object) -> Layout:
    """Build one shard's layout with one group of tied names."""
    return build_layout(specs, [tied], shard=at[0], num_shards=at[1], **more)  # type: ignore[arg-type]


def truth(**shapes: tuple[int, ...]) -> dict[str, Bytes]:
    """Draw the bytes of logical tensors."""
    rng = np.random.default_rng(7)
    return {name: logical_tensor(shape, DTYPE, rng) for name, shape in shapes.items()}


def moved(destination: Layout, sources: Sequence[Layout], values: dict[str, Bytes]) -> ReadPlan:
    """Plan with checksums, execute, compare with the truth, and return the plan."""
    rng = np.random.default_rng(8)
    memory = [fill(each, values, rng) for each in sources]
    plan = plan_read(destination, sources, [sums_of(*pair) for pair in zip(sources, memory, strict=True)])
    buffers, writes = execute(plan, destination, sources, memory)
    assert max((int(each.max()) for each in writes if len(each)), default=0) <= 1
    assert all(map(np.array_equal, buffers, expected(destination, values)))
    return plan


def refused(destination: Layout, sources: Sequence[Layout], sums: object = None) -> tuple[str, ...]:
    """Return the differences for which a plan is refused."""
    with pytest.raises(LayoutMismatch) as caught:
        plan_read(destination, sources, sums)  # type: ignore[arg-type]
    assert all(line in str(caught.value) for line in caught.value.differences)
    return caught.value.differences


def rows(name: str, total: int, count: int, index: int, *rest: int) -> TensorSpec:
    """Describe one row shard."""
    part = total // count
    box = Box(name, (index * part, *(0 for _ in rest)), (part, *rest), (0, *(0 for _ in rest)))
    return spec(name, part, *rest, boxes=[box])


def columns(name: str, height: int, total: int, count: int, index: int) -> TensorSpec:
    """Describe one column shard."""
    part = total // count
    return spec(name, height, part, boxes=[Box(name, (0, index * part), (height, part), (0, 0))])


# --- raw plans -------------------------------------------------------------------------------------------------------


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


# --- resharding ------------------------------------------------------------------------------------------------------


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


def test_copies_spread_over_sources_and_repeat_exactly() -> None:
    specs = [spec(f"norm{n:02}", 8) for n in range(40)]
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


# --- ties ------------------------------------------------------------------------------------------------------------


def tie(*, tied: bool, **more: object) -> Layout:
    """Describe an embedding and a head, in one storage or two."""
    return layout(
        spec("embed", 12, 4), spec("head", 12, 4), spec("norm", 4), tied=("embed", "head") if tied else (), **more
    )


def tie_values(*, equal: bool) -> dict[str, Bytes]:
    """Draw an embedding, and a head with the same bytes or others."""
    values = truth(embed=(12, 4), head=(12, 4), norm=(4,))
    return {**values, "head": values["embed"]} if equal else values


@pytest.mark.parametrize(("here", "there"), [(True, True), (False, True), (True, False)])
def test_tied_tensors_move_once(here: bool, there: bool) -> None:
    plan = moved(tie(tied=here), [tie(tied=there, segment_bytes=32)], tie_values(equal=True))
    assert plan.total_bytes == (12 + 1) * 4 * 2


def test_tied_here_but_different_there_is_refused() -> None:
    source = tie(tied=False, segment_bytes=32)
    memory = fill(source, tie_values(equal=False), np.random.default_rng(0))
    (line,) = refused(tie(tied=True), [source], [sums_of(source, memory)])
    assert line.startswith("tied: 'embed' and 'head'")
    assert refused(tie(tied=True), [source]) == (line,), "without checksums nothing proves them equal"


def test_one_flipped_bit_unties() -> None:
    source = tie(tied=False, segment_bytes=32)
    values = tie_values(equal=True)
    values["head"] = values["head"].copy()
    values["head"][11, 3, 1] ^= 1
    memory = fill(source, values, np.random.default_rng(0))
    assert len(refused(tie(tied=True), [source], [sums_of(source, memory)])) == 1


def test_a_tied_name_that_one_side_leaves_out() -> None:
    """`named_parameters()` names a tied tensor once, `state_dict()` twice."""
    values = tie_values(equal=True)
    short = layout(spec("embed", 12, 4), spec("norm", 4))
    moved(tie(tied=True), [short], values)
    moved(short, [tie(tied=True)], values)
    assert refused(tie(tied=False), [short]) == ("missing: the version has no 'head'",)
    assert refused(short, [tie(tied=False)]) == ("extra: the version has 'head', not registered here",)


def test_tied_head_on_the_last_pipeline_stage() -> None:
    """The second copy of a tied embedding lies in another shard: equal checksums let a tied engine take either."""
    values = tie_values(equal=True)
    names = ("embed", "head")
    stages = [layout(rows(names[s], 12, 1, 0, 4), at=(s, 2), segment_bytes=32) for s in range(2)]
    boxes = [spec(name, 12, 4, boxes=[Box(name, (0, 0), (12, 4), (0, 0))]) for name in names]
    moved(layout(*boxes, tied=names), stages, values)
    other = tie_values(equal=False)
    sums = [sums_of(each, fill(each, other, np.random.default_rng(0))) for each in stages]
    assert refused(layout(*boxes, tied=names), stages, sums)[0].startswith("tied:")


# --- differences -----------------------------------------------------------------------------------------------------


def test_all_differences_are_listed() -> None:
    here = layout(
        spec("dtype", 4, dtype="float16"), spec("lost", 2), spec("rank", 4), spec("same", 4), spec("shape", 2, 3)
    )
    there = layout(
        spec("dtype", 4), spec("more", 2), spec("rank", 2, 2), spec("same", 4), spec("shape", 3, 2), spec("zz")
    )
    assert refused(here, [there]) == (
        "dtype of 'dtype': registered float16, the version has bfloat16",
        "missing: the version has no 'lost'",
        "shape of 'rank': registered with 1 axes, the version has (2, 2)",
        "shape of 'shape': registered (2, 3), the version has (3, 2)",
        "extra: the version has 'more', not registered here",
        "extra: the version has 'zz', not registered here",
    )


def test_thousands_of_differences_keep_the_message_bounded() -> None:
    specs = [spec("x" * 300 + f"{n:05}", 1) for n in range(5000)]
    with pytest.raises(LayoutMismatch, match=r"(?s)5000 differences.*and \d+ more") as caught:
        plan_read(layout(*specs), [layout()])
    assert len(caught.value.differences) == 5000
    assert len(str(caught.value)) < 100_000


@pytest.mark.parametrize(("here", "there"), [("", "packed"), ("packed", ""), ("packed", "other"), ("packed", "packed")])
def test_processed_bytes_go_to_equal_layouts_only(here: str, there: str) -> None:
    lines = refused(layout(spec("a", 2), spec("b"), tag=here), [layout(spec("a", 2), tag=there)])
    assert len([line for line in lines if line.startswith("tag: ")]) == 2 - (here, there).count("")
    assert "missing: the version has no 'b'" in lines


def test_an_engine_may_leave_tensors_out_but_nothing_it_wants_may_lack() -> None:
    there = layout(spec("w", 8, 4), spec("rotary", 4))
    moved(layout(rows("w", 8, 2, 1, 4), at=(1, 2)), [there], truth(w=(8, 4), rotary=(4,)))
    beyond = layout(rows("w", 16, 2, 1, 4), at=(1, 2))
    assert refused(beyond, [there]) == ("shape of 'w': registered up to (16, 4), the version has (8, 4)",)
    shards = [layout(rows("w", 12, 3, r, 4), at=(r, 3)) for r in range(3)]
    assert refused(layout(spec("w", 12, 4)), shards[:2]) == ("gap in 'w': the version does not hold (8, 0) to (12, 4)",)
    assert refused(layout(spec("w", 8, 4)), shards) == ("shape of 'w': registered (8, 4), the version has (12, 4)",)


def test_shards_that_disagree_about_a_tensor() -> None:
    here = layout(rows("w", 8, 1, 0, 4))
    pair = [layout(spec("w", 8, 4), at=(0, 2)), layout(spec("w", 6, 4), at=(1, 2))]
    assert refused(here, pair) == ("shape of 'w': shards of the version disagree: (6, 4), (8, 4)",)
    pair[1] = layout(spec("w", 8, 4, dtype="int16"), at=(1, 2))
    assert refused(here, pair) == ("dtype of 'w': registered bfloat16, the version has bfloat16 and int16",)


# --- plain shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_bytes", [16, 4 << 20])
def test_plain_shards_read_their_own_shard(segment_bytes: int) -> None:
    """Shards registered without boxes hold different bytes under one name: shard 1 must never get those of shard 0."""
    values = [truth(w=(8, 4), b=(4,)), {name: ~each for name, each in truth(w=(8, 4), b=(4,)).items()}]
    specs = [spec("w", 8, 4), spec("b", 4)]
    sources = [layout(*specs, at=(r, 2), segment_bytes=segment_bytes) for r in range(2)]
    memory = [fill(each, held, np.random.default_rng(0)) for each, held in zip(sources, values, strict=True)]
    for index in range(2):
        here = layout(*specs, at=(index, 2), segment_bytes=64)
        buffers, _ = execute(plan_read(here, sources), here, sources, memory)
        assert all(map(np.array_equal, buffers, expected(here, values[index])))
        short = layout(specs[0], at=(index, 2), segment_bytes=64)
        assert refused(short, sources) == ("extra: the version has 'b', not registered here",)


def test_plain_shards_are_not_taken_for_whole_tensors() -> None:
    values = [truth(w=(8, 4)), {"w": ~truth(w=(8, 4))["w"]}]
    sources = [layout(spec("w", 8, 4), at=(r, 2), segment_bytes=32) for r in range(2)]
    sums = [
        sums_of(each, fill(each, held, np.random.default_rng(0))) for each, held in zip(sources, values, strict=True)
    ]
    (line,) = refused(layout(spec("w", 8, 4)), sources, sums)
    assert line.startswith("copies of 'w': shards 0 and 1")
    assert len(plan_read(layout(spec("w", 8, 4)), sources, [sums[0]] * 2)) == 2


def test_copies_may_differ_in_their_padding_only() -> None:
    values = truth(w=(4, 4))
    padded = spec("w4", 6, 4, boxes=[Box("w", (0, 0), (4, 4), (0, 0))])
    sources = [layout(padded, at=(r, 2), segment_bytes=16) for r in range(2)]
    memory = [fill(each, values, np.random.default_rng(r)) for r, each in enumerate(sources)]
    assert not np.array_equal(memory[0][0], memory[1][0])
    sums = [sums_of(*pair) for pair in zip(sources, memory, strict=True)]
    assert plan_read(layout(spec("w", 4, 4)), sources, sums).total_bytes == 32
    memory[1][0][5] ^= 1
    sums[1] = sums_of(sources[1], memory[1])
    assert refused(layout(spec("w", 4, 4)), sources, sums)[0].startswith("copies of 'w'")


def test_plain_shards_by_layer_merge_into_one() -> None:
    values = truth(**{f"layer{n}": (4, 2) for n in range(4)})
    halves = [layout(*(spec(f"layer{n}", 4, 2) for n in (2 * r, 2 * r + 1)), at=(r, 2)) for r in range(2)]
    whole = layout(*(spec(f"layer{n}", 4, 2) for n in range(4)))
    moved(whole, halves, values)
    moved(halves[1], [whole], values)
    assert refused(layout(spec("layer0", 4, 2)), halves)[0].startswith("extra: the version has 'layer1'")


# --- bounds ----------------------------------------------------------------------------------------------------------


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
