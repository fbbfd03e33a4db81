"""Compute and pack the checksums of segments: one u64 for each segment's bytes, packed little-endian."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client.weighted import weighted_sum
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Checksum

HostBytes = Callable[[int, int, int], memoryview]
"""Return `length` bytes from `offset` of a storage, in host memory: (storage, offset, length) -> bytes."""

_THREADED_BYTES = 64 << 20
_MAX_THREADS = 4
_THREADED_SEGMENT_BYTES = 64 << 10


Digest = Callable[[Any], int]
"""Return the checksum of bytes in host memory, given as any buffer."""


def host_digest(checksum: Checksum) -> Digest:
    """Return how a layout's checksums are computed in host memory."""
    return xxhash.xxh3_64_intdigest if checksum == "xxh3" else weighted_sum


def segment_sums(
    table: SegmentTable, host_bytes: HostBytes, threads: int | None = None, checksum: Checksum = "xxh3"
) -> NDArray[np.uint64]:
    """Return the checksum of every segment, u64 [segments].

    Large sets are hashed by up to `threads` threads (None = the CPUs, at most 4), because hashing gives up the
    interpreter lock; `host_bytes` is then called from all of them. Returns when every byte was read.
    """
    sums = np.zeros(len(table), np.uint64)
    if threads is None:
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    mean_bytes = table.total_bytes // max(1, len(table))
    if threads < 2 or table.total_bytes < _THREADED_BYTES or mean_bytes < _THREADED_SEGMENT_BYTES:
        _fill(sums, table, host_bytes, checksum, 0, len(table))
        return sums
    cuts = _even_cuts(table, threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="tensorhub-sums") as pool:
        parts = [pool.submit(_fill, sums, table, host_bytes, checksum, *cut) for cut in itertools.pairwise(cuts)]
        for part in parts:
            part.result()
    return sums


def _fill(
    sums: NDArray[np.uint64], table: SegmentTable, host_bytes: HostBytes, checksum: Checksum, begin: int, end: int
) -> None:
    digest = host_digest(checksum)
    storages = table.storage[begin:end].tolist()
    offsets = table.offset_bytes[begin:end].tolist()
    lengths = table.length_bytes[begin:end].tolist()
    sums[begin:end] = [digest(host_bytes(*run)) for run in zip(storages, offsets, lengths, strict=True)]


def _even_cuts(table: SegmentTable, parts: int) -> list[int]:
    """Return `parts + 1` segment numbers that cut the table into parts of about equal bytes."""
    ends = np.cumsum(table.length_bytes)
    goals = [table.total_bytes * part // parts for part in range(1, parts)]
    return [0, *(int(np.searchsorted(ends, goal)) for goal in goals), len(table)]


def pack_sums(sums: NDArray[np.uint64]) -> bytes:
    """Return the blob of checksums in segment order."""
    return sums.astype("<u8").tobytes()


def unpack_sums(data: bytes, table: SegmentTable) -> NDArray[np.uint64]:
    """Return the checksums of a blob from anyone; raises CorruptTransfer unless there is one for every segment."""
    if len(data) != 8 * len(table):
        raise CorruptTransfer(f"expected {len(table):,} checksums of 8 bytes, got {len(data):,} bytes")
    return np.frombuffer(data, "<u8").astype(np.uint64)
