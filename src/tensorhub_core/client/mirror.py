"""Host memory of another worker's layout, so that its bytes come over as they are, whatever they mean."""

from __future__ import annotations

import math

from tensorhub_core.client.host_memory import available_bytes
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.staged_memory import Arena
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError, LayoutMismatch
from tensorhub_core.layout.canonical import dtype_bytes
from tensorhub_core.layout.types import Layout


def blank_memory(layout: Layout, shard: int, num_shards: int) -> RegisteredMemory:
    """Return memory of exactly this layout; it is allocated, but touched only when it is filled.

    Raises LayoutMismatch unless it is that of shard `shard` of `num_shards`, ConfigError if there is not enough memory.
    """
    if (layout.shard, layout.num_shards) != (shard, num_shards):
        raise LayoutMismatch(
            f"the layout is that of shard {layout.shard} of {layout.num_shards}, this worker is {shard} of {num_shards}"
        )
    first = [layout.tensors[group[0]] for group in layout.storages]
    lengths = [math.prod(spec.shape) * dtype_bytes(spec.dtype) for spec in first]
    needed, available = sum(lengths), available_bytes()
    text = f"shard {shard} takes {needed:,} bytes of host memory"
    if available is not None and needed > available:
        raise ConfigError(f"{text}, {available:,} are available")
    try:
        arena = Arena(lengths)
    except MemoryError:
        raise ConfigError(f"{text}, which this machine refuses") from None
    tensors, boxes = {}, {}
    for group, buffer in zip(layout.storages, arena.buffers, strict=True):
        for spec in (layout.tensors[index] for index in group):
            tensors[spec.name] = RawTensor(spec.name, spec.dtype, spec.shape, buffer)
            if spec.boxes is not None:
                boxes[spec.name] = spec.boxes
    how = {"tag": layout.tag, "segment_bytes": layout.segment_bytes, "checksum": layout.checksum}
    memory = RegisteredMemory(tensors, boxes, shard=shard, num_shards=num_shards, **how)  # type: ignore[arg-type]
    assert memory.layout == layout, "canonical layouts are made of what they say"
    return memory
