"""The checksum of layouts on a device: weighted sums, which plain tensor operations compute where the bytes are.

A segment's bytes are padded with zeros to rows of 1,024 words (u64, little-endian). Every word is mixed with itself (an
exclusive or with its upper half), the words of a row are summed with odd weights for the columns, each row's sum is
mixed in the same way, and the rows are summed with odd weights of theirs; all modulo 2^64. Mixing and odd weights lose
nothing, so a change of one word is always found, and one of more words unless it cancels out. Without the mixing, upper
bits would cancel out easily: of a word's highest bit, an odd weight leaves only that bit.

On a CPU xxh3 is better for small segments, but it has no form in tensor operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

ROW_WORDS = 1024
_ROW_BYTES = 8 * ROW_WORDS
_BLOCK_ROWS = 32
"""Rows that are mixed at a time: they stay in the cache."""
_COLUMN_SEED = 0x9E3779B97F4A7C15
_ROW_SEED = 0xC2B2AE3D27D4EB4F
_LENGTH_SEED = 0x165667B19E3779F9
_MASK = (1 << 64) - 1


def weighted_sum(data: Any) -> int:
    """Return the checksum of bytes in host memory (any buffer)."""
    flat = np.frombuffer(data, np.uint8)
    whole = flat.size // _ROW_BYTES * _ROW_BYTES
    sums = _row_sums(flat[:whole])
    if whole < flat.size:
        last = np.zeros(_ROW_BYTES, np.uint8)
        last[: flat.size - whole] = flat[whole:]
        sums = np.concatenate((sums, _row_sums(last)))
    sums ^= sums >> np.uint64(32)
    return _with_length(int(np.einsum("i,i->", sums, _weights(len(sums), _ROW_SEED))), flat.size)


def _row_sums(flat: NDArray[np.uint8]) -> NDArray[np.uint64]:
    words, weights = flat.view("<u8").reshape(-1, ROW_WORDS), _weights(ROW_WORDS, _COLUMN_SEED)
    sums = np.empty(len(words), np.uint64)
    mixed = np.empty((min(len(words), _BLOCK_ROWS), ROW_WORDS), np.uint64)
    for begin in range(0, len(words), _BLOCK_ROWS):
        block = words[begin : begin + _BLOCK_ROWS]
        part = mixed[: len(block)]
        np.right_shift(block, np.uint64(32), out=part)
        np.bitwise_xor(block, part, out=part)
        # einsum makes no array of products: nine times as fast as multiplying and summing.
        np.einsum("ij,j->i", part, weights, out=sums[begin : begin + len(block)])
    return sums


def weighted_sums_of(runs: list[torch.Tensor]) -> NDArray[np.uint64]:
    """Return the checksums of runs of bytes (u8 tensors, all on one device), u64 [runs]; waits for the device once."""
    import torch

    totals = torch.stack([_total(run) for run in runs]).cpu().tolist() if runs else []
    return np.array(
        [_with_length(total & _MASK, run.numel()) for total, run in zip(totals, runs, strict=True)], np.uint64
    )


def _total(run: torch.Tensor) -> torch.Tensor:
    import torch

    rows = -(-run.numel() // (8 * ROW_WORDS))
    padded = torch.zeros(rows * ROW_WORDS * 8, dtype=torch.uint8, device=run.device)
    padded[: run.numel()].copy_(run)
    words = padded.view(torch.int64).reshape(rows, ROW_WORDS)
    sums = (_mixed(words) * _tensor_weights(ROW_WORDS, _COLUMN_SEED, run.device)).sum(dim=1)
    return (_mixed(sums) * _tensor_weights(rows, _ROW_SEED, run.device)).sum()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    # A shift of signed words fills with the sign: only the lower half of what it leaves is the upper half of the word.
    return words ^ ((words >> 32) & 0xFFFFFFFF)


def _weights(count: int, seed: int) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        return (2 * np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(seed)


def _tensor_weights(count: int, seed: int, device: torch.device) -> torch.Tensor:
    import torch

    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    return (2 * torch.arange(count, dtype=torch.int64, device=device) + 1) * signed


def _with_length(total: int, length_bytes: int) -> int:
    """Tell apart runs that differ only in how many zeros they end with."""
    return (total + length_bytes * _LENGTH_SEED) & _MASK
