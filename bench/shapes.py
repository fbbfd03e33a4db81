"""What the peers' bench moves: three shapes of about the same bytes, cut from one memory that processes share."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

GAP_BYTES = 128
"""Between tensors, so that no two of them are one run: in a real model they are allocations of their own."""
_ALIGN_BYTES = 64
_SHARD_BYTES = 16.4e9
_LAYERS = 36
_SMALL = (4 << 10, 64 << 10)
_SMALL_COUNT = 20_000

CASES = ("one buffer", "model shard", "small tensors")


@dataclass(frozen=True)
class Shape:
    """One case: `offsets` and `lengths` in bytes of its tensors within the memory."""

    case: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @cached_property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(self.lengths)

    @property
    def span_bytes(self) -> int:
        """Return the bytes from the first tensor to the end of the last one."""
        return self.offsets[-1] + self.lengths[-1]

    def tensors(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Cut the tensors out of a memory."""
        return [memory[at : at + length] for at, length in zip(self.offsets, self.lengths, strict=True)]


def shape_of(case: str, total_bytes: int) -> Shape:
    """Return a case scaled to about `total_bytes`."""
    lengths = {"one buffer": _one, "model shard": _shard, "small tensors": _small}[case](total_bytes)
    room = [-(-(length + GAP_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(room)[:-1]]).tolist()
    return Shape(case, tuple(offsets), tuple(lengths))


def _one(total_bytes: int) -> list[int]:
    return [total_bytes]


def _shard(total_bytes: int) -> list[int]:
    """Return the tensors of a Qwen3-8B in bfloat16 with every dimension scaled alike: 399 of them."""
    scale = (total_bytes / _SHARD_BYTES) ** 0.5
    hidden, inner, heads, vocabulary = (max(16, round(size * scale / 16) * 16) for size in (4096, 12288, 1024, 151_936))
    head = 128
    layer = [hidden * hidden, heads * hidden, heads * hidden, hidden * hidden, head, head]
    layer += [inner * hidden, inner * hidden, hidden * inner, hidden, hidden]
    elements = [vocabulary * hidden, *(_LAYERS * layer), hidden, vocabulary * hidden]
    return [2 * count for count in elements]


def _small(total_bytes: int) -> list[int]:
    """Return tensors of 4-64 KiB, 20,000 for a GiB."""
    count = max(1, round(_SMALL_COUNT * total_bytes / (1 << 30)))
    drawn = np.random.default_rng(7).integers(_SMALL[0], _SMALL[1] + 1, count)
    return (drawn // _ALIGN_BYTES * _ALIGN_BYTES).astype(int).tolist()


def memory_of(file: int) -> NDArray[np.uint8]:
    """Map a memory file that processes share as u8 [bytes]."""
    return np.frombuffer(mmap.mmap(file, 0), np.uint8)
