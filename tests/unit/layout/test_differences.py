"""What is refused before a byte moves: differences, untied bytes, plain shards taken for whole tensors."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Box, Layout
from tests.property.layout.world import Bytes, execute, expected, fill, sums_of
from tests.unit.layout.shapes import layout, moved, refused, rows, spec, truth


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


def test_all_differences_inside_a_fused_tensor_are_listed() -> None:
    boxes = [Box(name, (0,), (4,), (4 * n,)) for n, name in enumerate(("dtype", "lost", "short", "zz"))]
    there = layout(spec("dtype", 4, dtype="int16"), rows("short", 6, 2, 0), spec("zz", 4))
    assert refused(layout(spec("fused", 16, boxes=boxes)), [there]) == (
        "missing: the version has no 'lost'",
        "dtype of 'dtype': registered bfloat16, the version has int16",
        "gap in 'short': the version does not hold (3,) to (4,)",
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


@pytest.mark.parametrize("boxed", [False, True])
def test_copies_that_are_cut_differently_are_not_compared(boxed: bool) -> None:
    """Checksums of other segments say nothing, and there are not as many."""
    values = truth(w=(8, 4))
    whole = rows("w", 8, 1, 0, 4) if boxed else spec("w", 8, 4)
    moved(
        layout(rows("w", 8, 2, 1, 4)), [layout(whole, at=(r, 2), segment_bytes=(64, 16)[r]) for r in range(2)], values
    )
    wide = spec("w", 8, 4, boxes=whole.boxes, dtype="float64")
    pair = [layout(whole, at=(0, 2), segment_bytes=64), layout(wide, at=(1, 2), segment_bytes=64)]
    sums = [np.arange(len(segment_table(each)), dtype=np.uint64) for each in pair]
    assert refused(layout(spec("w", 8, 4)), pair, sums) == (
        "dtype of 'w': registered bfloat16, the version has bfloat16 and float64",
    )


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
    sources = [layout(padded, at=(r, 2), segment_bytes=24) for r in range(2)]
    memory = [fill(each, values, np.random.default_rng(r)) for r, each in enumerate(sources)]
    assert not np.array_equal(memory[0][0], memory[1][0])
    sums = [sums_of(*pair) for pair in zip(sources, memory, strict=True)]
    assert plan_read(layout(spec("w", 4, 4)), sources, sums).total_bytes == 48
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
