"""Describe tensors and shards in a line, and move their bytes through a plan that is compared with numpy slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.plan import ReadPlan, plan_read
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
