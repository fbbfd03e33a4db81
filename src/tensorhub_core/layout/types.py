"""Describe a shard's tensors without addresses: what two workers must agree on before bytes move.

A `Layout` is canonical: tensors are sorted by name, so that equal sets of tensors have equal fingerprints whatever the
order they were registered in. Logical coordinates are those of the Hugging Face named tensors (DESIGN.md section 7).
"""

from __future__ import annotations

from typing import Literal

import msgspec

IDENTITY_TAG = ""
Checksum = Literal["xxh3", "weighted"]
"""xxh3_64, or for memory of devices weighted sums of words (client/weighted.py)."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """Place a region of a logical tensor in a physical one: `logical[offset:offset+shape]` is at `local_offset`.

    `offset` and `shape` have the logical tensor's rank, `local_offset` the physical one's. Where they differ, the last
    axes correspond and the box has size 1 on the others (one expert's matrix in a stack of experts).
    """

    logical: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Describe one physical tensor.

    `boxes=None` means identity: the tensor is the whole logical tensor of the same name. Elements outside every box
    are padding: never read for another layout, never written by one. `dtype` is torch's name without prefix
    (`bfloat16`, `float8_e4m3fn`, `bool`, ...).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...] | None = None


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Describe a shard: `tensors` sorted by name; `storages[i]` = the indices of tensors that share the same bytes.

    Storages are sorted by their first tensor; each tensor is in exactly one. A non-empty `tag` says that the bytes
    are in a processed form that only an equal layout can read. `checksum` names how its segments are summed.
    """

    shard: int
    num_shards: int
    tensors: tuple[TensorSpec, ...]
    storages: tuple[tuple[int, ...], ...]
    tag: str = IDENTITY_TAG
    segment_bytes: int = 4 << 20
    checksum: Checksum = "xxh3"


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Unit of transfer, verification and resume: a box of one storage that is contiguous in its canonical bytes.

    `start` and `shape` are in elements of the storage's first tensor; `offset_bytes` and `length_bytes` in its
    C-ordered bytes. Zero-sized storages have no segment.
    """

    index: int
    storage: int
    offset_bytes: int
    length_bytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """Say where a worker's storages lie, for a reader that has attached its transport agent.

    `addresses` packs one little-endian u64 per storage of the layout (0 for zero-sized ones), `devices` one index per
    storage into `device_names`. `word` is the address of the eight bytes in memory of the CPU that say how far an
    unfinished copy is (client/prefix_word.py), 0 if there are none.
    """

    transport: str
    agent: bytes
    addresses: bytes
    device_names: tuple[str, ...]
    devices: bytes
    word: int = 0
