"""What a version's bytes are: logical tensors from a training run's name and a number, cut for any number of shards."""

from __future__ import annotations

import functools
import random

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.types import Box

ROWS, COLUMNS, LENGTH, COMMON = 8, 48, 160, 70
BY_COLUMNS = 3
"""A replica of so many shards has its matrix cut by columns, all others by rows."""
MOST_BYTES = ROWS * COLUMNS + LENGTH + BY_COLUMNS * COMMON
"""What all shards of a replica hold together, at most."""
Bytes = NDArray[np.uint8]


@functools.lru_cache(maxsize=512)
def logical(stream: str, number: int) -> dict[str, Bytes]:
    """Return the whole tensors of a version."""
    chance = random.Random(f"{stream}:{number}")
    shapes = {"matrix": (ROWS, COLUMNS), "vector": (LENGTH,), "common": (COMMON,)}
    return {
        name: np.frombuffer(chance.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)
        for name, shape in shapes.items()
    }


def shard_of(stream: str, number: int, shard: int, num_shards: int) -> dict[str, Bytes]:
    """Return what one shard holds of a version."""
    whole = logical(stream, number)
    return {
        name: whole[name][tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
        for name, (box,) in boxes(shard, num_shards).items()
    }


def empty(shard: int, num_shards: int) -> dict[str, Bytes]:
    """Return memory for one shard."""
    return {name: np.zeros_like(part) for name, part in shard_of("", 0, shard, num_shards).items()}


def boxes(shard: int, num_shards: int) -> dict[str, list[Box]]:
    """Return where a shard's tensors lie in the logical ones."""
    (top, rows), (left, columns) = (0, ROWS), (0, COLUMNS)
    if num_shards == BY_COLUMNS:
        left, columns = _part(COLUMNS, shard, num_shards)
    else:
        top, rows = _part(ROWS, shard, num_shards)
    begin, length = _part(LENGTH, shard, num_shards)
    return {
        "matrix": [Box("matrix", (top, left), (rows, columns), (0, 0))],
        "vector": [Box("vector", (begin,), (length,), (0,))],
        "common": [Box("common", (0,), (COMMON,), (0,))],
    }


def _part(size: int, shard: int, num_shards: int) -> tuple[int, int]:
    begin, end = shard * size // num_shards, (shard + 1) * size // num_shards
    return begin, end - begin


def holds(memory: dict[str, Bytes], stream: str, number: int, shard: int, num_shards: int) -> bool:
    """Tell whether memory holds a version's shard, in every byte."""
    right = shard_of(stream, number, shard, num_shards)
    return all(memory[name].tobytes() == part.tobytes() for name, part in right.items())
