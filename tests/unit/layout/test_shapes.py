"""A reader that knows how large logical tensors are notices a version with larger or smaller ones."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.shapes import shape_differences
from tensorhub_core.layout.types import Box, Layout, TensorSpec


def halves(rows: int) -> list[Layout]:
    return [
        Layout(
            rank,
            2,
            (TensorSpec("qk", "float32", (rows, 4), (Box("q", (rank * rows, 0), (rows, 4), (0, 0)),)),),
            ((0,),),
        )
        for rank in (0, 1)
    ]


def plain(name: str, shape: tuple[int, ...]) -> Layout:
    return Layout(0, 1, (TensorSpec(name, "float32", shape),), ((0,),))


def test_all_shards_together_reach_as_far_as_the_tensor() -> None:
    assert shape_differences(halves(3), {"q": (6, 4)}) == []
    assert shape_differences(halves(3)[:1], {"q": (6, 4)}) == ["shape of 'q': expected (6, 4), the version has (3, 4)"]


@pytest.mark.parametrize("shape", [(8, 4), (6, 5), (6,), (3, 4)])
def test_other_shapes_and_ranks_are_named(shape: tuple[int, ...]) -> None:
    (text,) = shape_differences([plain("q", shape)], {"q": (6, 4), "other": (1,)})
    assert text == f"shape of 'q': expected (6, 4), the version has {shape}"


def test_a_part_of_a_larger_tensor_does_not_pass_for_a_smaller_one() -> None:
    memory = RegisteredMemory(
        {"qk": np.zeros((6, 4), np.float32)}, {"qk": [Box("q", (0, 0), (6, 4), (0, 0))]}, shapes={"q": (6, 4)}
    )
    larger, fitting = plain("q", (8, 4)), plain("q", (6, 4))
    sums = [np.zeros(len(segment_table(larger)), np.uint64)]
    with pytest.raises(LayoutMismatch, match="expected \\(6, 4\\), the version has \\(8, 4\\)"):
        memory.plan_read([larger], sums)
    assert len(memory.plan_read([fitting], sums)) == 1


def test_shapes_are_listed_with_all_other_differences() -> None:
    tensors = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}
    boxes = {name: [Box(name, (0,), (4,), (0,))] for name in tensors}
    memory = RegisteredMemory(tensors, boxes, shapes={"a": (4,), "b": (4,)})
    source = plain("a", (6,))
    with pytest.raises(LayoutMismatch) as caught:
        memory.plan_read([source], [np.zeros(len(segment_table(source)), np.uint64)])
    assert len(caught.value.differences) == 2
