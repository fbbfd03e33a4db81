"""Draw logical tensors and layouts that hold them whole, split, fused, interleaved, padded, stacked and replicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.types import Box, Layout, TensorSpec
from tests.property.layout.world import Bytes, logical_tensor

DTYPES = ("uint8", "bfloat16", "float32", "complex64", "complex128")
SEGMENT_BYTES = st.sampled_from((16, 24, 40, 64, 200, 4 << 20))

Region = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(logical name, offset, shape)."""


@dataclass(frozen=True)
class Logical:
    """A logical tensor of a model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@st.composite
def logicals(draw: st.DrawFn, most: int = 3) -> list[Logical]:
    """Draw a model's logical tensors."""
    count = draw(st.integers(1, most))
    shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    return [Logical(f"t{i}", draw(st.sampled_from(DTYPES[:3] if i else DTYPES)), draw(shapes)) for i in range(count)]


def contents(model: Sequence[Logical], seed: int) -> dict[str, Bytes]:
    """Return the bytes of a model."""
    rng = np.random.default_rng(seed)
    return {each.name: logical_tensor(each.shape, each.dtype, rng) for each in model}


@st.composite
def tiling(draw: st.DrawFn, each: Logical) -> list[Region]:
    """Cut a logical tensor into disjoint regions that make up the whole: rows, columns, blocks, or unequal parts."""
    cuts = [
        sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) if length else [0, 0]
        for length in each.shape
    ]
    regions: list[Region] = [(each.name, (), ())]
    for points in cuts:
        regions = [
            (name, (*offset, a), (*shape, b - a)) for name, offset, shape in regions for a, b in pairwise(points)
        ]
    return regions


@st.composite
def some_region(draw: st.DrawFn, each: Logical) -> Region:
    """Draw any box of a logical tensor."""
    offset, shape = [], []
    for length in each.shape:
        a, b = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        offset.append(a)
        shape.append(b - a)
    return each.name, tuple(offset), tuple(shape)


@st.composite
def packed(draw: st.DrawFn, regions: Sequence[Region], dtype: str, name: str) -> TensorSpec:
    """Put regions of one dtype into one physical tensor: stacked along an axis, with gaps, perhaps under a new axis."""
    order = draw(st.permutations(range(len(regions))))
    rank = max(len(shape) for _, _, shape in regions) + draw(st.integers(0, 1))
    axis = draw(st.integers(0, rank - 1)) if rank else 0
    if not rank and len(regions) > 1:
        rank = 1
    at = 0
    inner = [0] * rank
    boxes: list[Box] = []
    for number in order:
        logical, offset, shape = regions[number]
        local = (1,) * (rank - len(shape)) + shape
        slack = [draw(st.integers(0, 1)) for _ in range(rank)]
        place = list(slack)
        if rank:
            at += slack[axis]
            place[axis] = at
            at += local[axis]
            inner = [max(full, a + n) for full, a, n in zip(inner, place, local, strict=True)]
        boxes.append(Box(logical, offset, shape, tuple(place)))
    full = tuple(length + draw(st.integers(0, 1)) for length in inner)
    return TensorSpec(name, dtype, full, tuple(boxes))


@st.composite
def holder(draw: st.DrawFn, regions: Sequence[Region], model: Sequence[Logical], shard: int, num_shards: int) -> Layout:
    """Draw a layout that holds the regions, some of them fused, some as whole tensors of their own name."""
    by_name = {each.name: each for each in model}
    loose: dict[str, list[Region]] = {}
    specs: list[TensorSpec] = []
    for position, one in enumerate(regions):
        each = by_name[one[0]]
        plain = one[2] == each.shape and each.name not in {spec.name for spec in specs}
        if plain and draw(st.booleans()):
            specs.append(TensorSpec(each.name, each.dtype, each.shape))
        elif draw(st.booleans()):
            loose.setdefault(each.dtype, []).append(one)
        else:
            specs.append(draw(packed([one], each.dtype, f"one.{position}")))
    specs += [draw(packed(group, dtype, f"fused.{dtype}")) for dtype, group in loose.items()]
    return build_layout(specs, shard=shard, num_shards=num_shards, segment_bytes=draw(SEGMENT_BYTES))


@st.composite
def sources(draw: st.DrawFn, model: Sequence[Logical], *, whole: bool) -> list[Layout]:
    """Draw a replica's shards; `whole` ones hold everything, some regions more than once, else anything may lack."""
    num_shards = draw(st.integers(1, 3))
    held: list[list[Region]] = [[] for _ in range(num_shards)]
    for each in model:
        for one in draw(tiling(each)):
            least = 1 if whole else 0
            for shard in draw(st.sets(st.integers(0, num_shards - 1), min_size=least, max_size=num_shards)):
                held[shard].append(one)
        if draw(st.booleans()):
            held[draw(st.integers(0, num_shards - 1))].append(draw(some_region(each)))
    return [draw(holder(regions, model, shard, num_shards)) for shard, regions in enumerate(held)]


@st.composite
def destinations(draw: st.DrawFn, model: Sequence[Logical]) -> Layout:
    """Draw one shard that wants any regions, some of them perhaps twice."""
    num_shards = draw(st.integers(1, 4))
    wanted: list[Region] = []
    for each in model:
        kind = draw(st.sampled_from(("whole", "tiles", "some", "twice")))
        if kind == "whole":
            wanted.append((each.name, (0,) * len(each.shape), each.shape))
        elif kind == "tiles":
            wanted += draw(tiling(each))
        else:
            wanted.append(draw(some_region(each)))
            wanted += [draw(some_region(each))] * (kind == "twice")
    shard = draw(st.integers(0, num_shards - 1))
    return draw(holder(wanted, model, shard, num_shards))
