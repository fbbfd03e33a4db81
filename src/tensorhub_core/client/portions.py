"""Cut a version into portions: runs of whole tensors that fit into a bounded memory one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.segments import SegmentTable, segment_table
from tensorhub_core.layout.types import Box, Layout, TensorSpec

_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Some whole tensors of a version, each at its one of `offsets_bytes` (u64 [tensors]) of a room of `room_bytes`.

    In `layout` they have boxes, or those of other portions would be missed in it.
    """

    layout: Layout
    table: SegmentTable
    offsets_bytes: NDArray[np.uint64]
    room_bytes: int

    def tensors(self, room: NDArray[np.uint8]) -> Iterator[RawTensor]:
        """Yield the tensors as they lie in a room, u8 [room_bytes]."""
        for spec, at in zip(self.layout.tensors, self.offsets_bytes.tolist(), strict=True):
            yield RawTensor(spec.name, spec.dtype, spec.shape, room[at : at + _bytes_of(spec)])


def cut_portions(whole: Layout, limit_bytes: int) -> list[Portion]:
    """Cut a plain layout into portions of at most `limit_bytes`; a tensor that is larger is a portion of its own."""
    portions: list[Portion] = []
    taken: list[TensorSpec] = []
    used = 0
    for spec in whole.tensors:
        size = _room_of(spec)
        if taken and used + size > limit_bytes:
            portions.append(_portion(whole, taken))
            taken, used = [], 0
        taken.append(spec)
        used += size
    return [*portions, _portion(whole, taken)] if taken else portions


def arena_bytes(portions: Sequence[Portion], half_bytes: int) -> int:
    """Return the memory in which two portions of up to `half_bytes` lie at a time, or a larger one alone."""
    sizes = [portion.room_bytes for portion in portions]
    both = 2 * half_bytes if sum(size <= half_bytes for size in sizes) > 1 else 0
    return max([both, *sizes], default=0)


def _portion(whole: Layout, specs: Sequence[TensorSpec]) -> Portion:
    layout = build_layout(
        [TensorSpec(spec.name, spec.dtype, spec.shape, (_all_of(spec),)) for spec in specs],
        shard=whole.shard,
        num_shards=whole.num_shards,
        segment_bytes=whole.segment_bytes,
        checksum=whole.checksum,
    )
    ends = np.cumsum([0, *map(_room_of, specs)], dtype=np.uint64)
    return Portion(layout, segment_table(layout), ends[:-1], int(ends[-1]))


def _all_of(spec: TensorSpec) -> Box:
    origin = (0,) * len(spec.shape)
    return Box(spec.name, origin, spec.shape, origin)


def _bytes_of(spec: TensorSpec) -> int:
    return prod(spec.shape) * dtype_bytes(spec.dtype)


def _room_of(spec: TensorSpec) -> int:
    return -(-_bytes_of(spec) // _ALIGN_BYTES) * _ALIGN_BYTES
