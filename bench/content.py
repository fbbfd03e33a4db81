"""What workers of benches and link tests hold: arrays that both sides of a process boundary can make from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

SENTINEL = 0xA5
"""What memory holds before it is filled."""

Arrays = dict[str, NDArray[np.uint8]]


def make(total_bytes: int, count: int, seed: int) -> Arrays:
    """Return up to `count` arrays of random bytes, `total_bytes` in all; only the bytes depend on the seed."""
    cuts = np.random.default_rng(0).integers(1, total_bytes, count - 1)
    lengths = np.diff(np.unique(np.concatenate([[0, total_bytes], cuts]))).tolist()
    rng = np.random.default_rng(seed)
    return {f"tensor {index}": rng.integers(0, 256, length, np.uint8) for index, length in enumerate(lengths)}


def digest(arrays: Mapping[str, NDArray[np.uint8]]) -> str:
    """Return one hash of all names and bytes."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(f"{name!r} {len(arrays[name])} ".encode())
        found.update(arrays[name].data)
    return found.hexdigest()
