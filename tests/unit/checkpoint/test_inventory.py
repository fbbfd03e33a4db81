"""The whole tensors of a version are found from any layouts that hold them, or the reason why not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.checkpoint.inventory import HeldBy, take_inventory
from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.types import Box, Layout, TensorSpec


def plain(names: str, aliases: tuple[str, ...] = (), shard: int = 0, num_shards: int = 1, tag: str = "") -> Layout:
    specs = [TensorSpec(name, "bfloat16", (4, 2)) for name in names]
    return build_layout(specs, [aliases] if aliases else [], shard=shard, num_shards=num_shards, tag=tag)


def boxed(name: str, boxes: list[Box], shape: tuple[int, ...], shard: int = 0, num_shards: int = 1) -> Layout:
    return build_layout(
        [TensorSpec(name, "float32", shape, tuple(boxes))], shard=shard, num_shards=num_shards, segment_bytes=8192
    )


def test_one_worker_with_all_tensors_by_name_is_taken_as_it_is() -> None:
    layout = plain("abc", aliases=("a", "c"))
    inventory = take_inventory([HeldBy("trainer", layout)])
    assert inventory.tensors == layout.tensors
    assert inventory.aliases == (("a", "c"),)
    assert build_layout(inventory.tensors, inventory.aliases, shard=0, num_shards=1) == layout


def test_such_a_worker_is_preferred_to_an_engine() -> None:
    engine = [HeldBy("a-engine", boxed("w", [Box("a", (0,), (4,), (0,))], (4,), shard=i, num_shards=2)) for i in (0, 1)]
    assert take_inventory([*engine, HeldBy("trainer", plain("ab"))]).replica == "trainer"


def test_plain_shards_are_united() -> None:
    holders = [
        HeldBy("trainer", plain("ab", shard=0, num_shards=2)),
        HeldBy("trainer", plain("bc", shard=1, num_shards=2)),
    ]
    assert [tensor.name for tensor in take_inventory(holders).tensors] == ["a", "b", "c"]


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    padding=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_boxes_of_all_shards_make_the_whole_tensors(rows: int, columns: int, cuts: list[int], padding: int) -> None:
    edges = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    pieces = list(itertools.pairwise(edges))
    holders = []
    for shard, (start, stop) in enumerate(pieces):
        height = stop - start
        boxes = [
            Box("gate", (start, 0), (height, columns), (0, 0)),
            Box("up", (start, 0), (height, columns), (height, 0)),
        ]
        layout = boxed("gate_up", boxes, (2 * height + padding, columns), shard, len(pieces))
        holders.append(HeldBy("engine", layout))
    inventory = take_inventory(holders[::-1])
    assert inventory.tensors == (
        TensorSpec("gate", "float32", (rows, columns)),
        TensorSpec("up", "float32", (rows, columns)),
    )
    assert inventory.aliases == ()
    assert inventory.segment_bytes == 8192


@pytest.mark.parametrize(
    ("layouts", "reason"),
    [
        ([plain("a", tag="vllm-fp8")], "processed form 'vllm-fp8'"),
        ([plain("a", num_shards=3), plain("a", shard=2, num_shards=3)], r"shards \[1\] of 3 are not held"),
        ([boxed("w", [Box("a", (2,), (2,), (0,))], (2,))], "'?a'?"),
        (
            [
                boxed("w", [Box("a", (0,), (2,), (0,))], (2,), 0, 2),
                boxed("w", [Box("a", (0, 0), (2, 2), (0, 0))], (2, 2), 1, 2),
            ],
            "disagree about dtype or axes of 'a'",
        ),
    ],
)
def test_what_does_not_add_up_says_why(layouts: list[Layout], reason: str) -> None:
    with pytest.raises(LayoutMismatch, match=f"cannot be written as whole tensors: engine: .*{reason}") as caught:
        take_inventory([HeldBy("engine", layout) for layout in layouts])
    assert len(caught.value.differences) == 1


def test_another_replica_helps_out() -> None:
    holders = [HeldBy("a", plain("a", tag="packed")), HeldBy("b", boxed("w", [Box("a", (0,), (4,), (0,))], (4,)))]
    assert take_inventory(holders).tensors == (TensorSpec("a", "float32", (4,)),)


def test_nobody_holds_it() -> None:
    with pytest.raises(LayoutMismatch, match=r"in no layout at all"):
        take_inventory([])
