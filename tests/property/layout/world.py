"""Memory for layouts: buffers filled and read back by numpy slicing, which is the truth plans are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.layout.canonical import dtype_bytes
from tensorhub_core.layout.read_plan import ReadPlan, shape_of_read
from tensorhub_core.layout.scatter import scatter_bytes, scatter_cast
from tensorhub_core.layout.segments import segment_box, segment_table
from tensorhub_core.layout.types import Box, Layout, Segment, TensorSpec

SENTINEL = 0xA5

Bytes = NDArray[np.uint8]


def logical_tensor(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Bytes:
    """Return u8 [*shape, item bytes] of hostile values: NaN payloads, -0.0, infinities, and anything."""
    raw = rng.integers(0, 256, (*shape, dtype_bytes(dtype)), np.uint8)
    kinds = rng.integers(0, 4, shape)[..., None]
    raw = np.where(kinds == 0, np.uint8(0xFF), raw)
    raw[..., -1] = np.where(kinds[..., 0] == 1, np.uint8(0x80), raw[..., -1])
    return np.ascontiguousarray(raw)


def boxes_of(spec: TensorSpec) -> tuple[Box, ...]:
    """Return a tensor's boxes, the identity written out."""
    zeros = (0,) * len(spec.shape)
    return (Box(spec.name, zeros, spec.shape, zeros),) if spec.boxes is None else spec.boxes


def region(array: Bytes, start: tuple[int, ...], shape: tuple[int, ...]) -> Bytes:
    """Return the view of a box; the array's last axis is the bytes of an item."""
    return array[(*(slice(a, a + n) for a, n in zip(start, shape, strict=True)), slice(None))]


def local_view(buffer: Bytes, spec: TensorSpec, box: Box) -> Bytes:
    """Return the box's place in a tensor's bytes, shaped like the logical region."""
    array = buffer.reshape(*spec.shape, dtype_bytes(spec.dtype))
    lead = len(spec.shape) - len(box.shape)
    shape = (1,) * lead + box.shape if lead >= 0 else box.shape[-lead:]
    return region(array, box.local_offset, shape).reshape(*box.shape, array.shape[-1])


def fill(layout: Layout, logicals: Mapping[str, Bytes], rng: np.random.Generator) -> list[Bytes]:
    """Return one buffer per storage of a source; padding holds noise."""
    buffers: list[Bytes] = []
    for group in layout.storages:
        first = layout.tensors[group[0]]
        buffer = rng.integers(0, 256, int(np.prod(first.shape, dtype=int)) * dtype_bytes(first.dtype), np.uint8)
        for tensor in group:
            put(buffer, layout.tensors[tensor], logicals)
        buffers.append(buffer)
    return buffers


def put(buffer: Bytes, spec: TensorSpec, logicals: Mapping[str, Bytes]) -> None:
    """Write a tensor's logical regions to its bytes."""
    array = buffer.reshape(*spec.shape, dtype_bytes(spec.dtype))
    for box in boxes_of(spec):
        data = region(logicals[box.logical], box.offset, box.shape)
        lead = len(spec.shape) - len(box.shape)
        shape = (1,) * lead + box.shape if lead >= 0 else box.shape[-lead:]
        region(array, box.local_offset, shape)[...] = data.reshape(*shape, array.shape[-1])


def empty(layout: Layout) -> list[Bytes]:
    """Return one buffer per storage of a destination, all sentinel."""
    return [
        np.full(int(np.prod(spec.shape, dtype=int)) * dtype_bytes(spec.dtype), SENTINEL, np.uint8)
        for spec in (layout.tensors[group[0]] for group in layout.storages)
    ]


def expected(layout: Layout, logicals: Mapping[str, Bytes]) -> list[Bytes]:
    """Return what a destination's buffers have to hold: numpy slices of the logical tensors, else sentinel."""
    buffers = empty(layout)
    for buffer, group in zip(buffers, layout.storages, strict=True):
        put(buffer, layout.tensors[group[0]], logicals)
    return buffers


def sums_of(layout: Layout, buffers: Sequence[Bytes]) -> NDArray[np.uint64]:
    """Return the checksums of a source's segments."""
    table = segment_table(layout)
    runs = zip(table.storage.tolist(), table.offset_bytes.tolist(), table.length_bytes.tolist(), strict=True)
    return np.array([xxhash.xxh3_64_intdigest(buffers[s][a : a + n].tobytes()) for s, a, n in runs], np.uint64)


def taken(plan: ReadPlan, read: int, segment: Segment) -> NDArray[np.int64]:
    """Return which bytes of its segment a read takes, in their order."""
    cut, cuts = int(plan.cut[read]), plan.cuts
    if cut < 0:
        return np.arange(segment.length_bytes)
    assert cuts.segment[cut] == segment.index
    begins = cuts.offset_bytes[cut] + np.arange(cuts.count[cut]) * cuts.stride_bytes[cut]
    return (begins[:, None] + np.arange(cuts.run_bytes[cut])).reshape(-1)


def execute(
    plan: ReadPlan, destination: Layout, sources: Sequence[Layout], memory: Sequence[Sequence[Bytes]]
) -> tuple[list[Bytes], list[NDArray[np.int64]]]:
    """Carry out a plan; return the destination's buffers and how often each of their bytes was written."""
    buffers = empty(destination)
    writes = [np.zeros(len(buffer), np.int64) for buffer in buffers]
    tables = [segment_table(layout) for layout in sources]
    for read in range(len(plan)):
        source, index = int(plan.source[read]), int(plan.segment[read])
        segment = segment_box(sources[source], tables[source], index)
        begin = segment.offset_bytes
        data = memory[source][segment.storage][begin : begin + segment.length_bytes][taken(plan, read, segment)]
        assert len(data) == plan.length_bytes[read]
        if plan.direct[read]:
            storage, offset = int(plan.storage[read]), int(plan.offset_bytes[read])
            assert offset + len(data) <= len(buffers[storage])
            buffers[storage][offset : offset + len(data)] = data
            writes[storage][offset : offset + len(data)] += 1
            continue
        for scatter in plan.scatters[read]:
            spec = destination.tensors[destination.storages[scatter.storage][0]]
            dtype = sources[source].tensors[sources[source].storages[segment.storage][0]].dtype
            item_bytes = dtype_bytes(spec.dtype)
            shape = shape_of_read(plan, read, segment.shape, dtype_bytes(dtype))
            if dtype == spec.dtype:
                scatter_bytes(data, shape, scatter, buffers[scatter.storage], spec.shape, item_bytes)
            else:
                assert plan.casts
                scatter_cast(data, shape, scatter, buffers[scatter.storage], spec.shape, (dtype, spec.dtype))
            mark = np.zeros(len(buffers[scatter.storage]), np.uint8)
            ones = np.ones(int(np.prod(shape, dtype=int)) * item_bytes, np.uint8)
            scatter_bytes(ones, shape, scatter, mark, spec.shape, item_bytes)
            writes[scatter.storage] += mark
    return buffers, writes
