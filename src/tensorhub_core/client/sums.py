"""Compute and pack the checksums of segments: one u64 for each segment's bytes, packed little-endian."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client.weighted import weighted_sum
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.cuts import Cuts
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Checksum

_THREADED_BYTES = 64 << 20
_MAX_THREADS = 4

Sums = Callable[[Sequence[int], Sequence[int]], NDArray[np.uint64]]
"""Return the checksums of runs of host memory, (addresses, lengths in bytes) -> u64 [runs]. Any thread."""


def host_sums(checksum: Checksum) -> Sums:
    """Return how a layout's checksums are computed in host memory, giving up the interpreter lock meanwhile.

    xxhash keeps the lock below 100 KB, and for a whole batch of small segments whoever posts the next one would wait:
    so its C function is called by address, where the package exports it.
    """
    function = _native_xxh3() if checksum == "xxh3" else None
    if function is not None:
        native = function
        return lambda addresses, lengths: np.fromiter(map(native, addresses, lengths), np.uint64, len(addresses))
    digest = xxhash.xxh3_64_intdigest if checksum == "xxh3" else weighted_sum

    def by_views(addresses: Sequence[int], lengths: Sequence[int]) -> NDArray[np.uint64]:
        return np.fromiter(map(digest, map(_view, addresses, lengths)), np.uint64, len(addresses))

    return by_views


@functools.cache
def _native_xxh3() -> Callable[[int, int], int] | None:
    """Return XXH3_64bits(address, length) of the xxhash package's own library; None if it does not show it."""
    try:
        library = importlib.import_module("xxhash._xxhash").__file__
        function = ctypes.CDLL(str(library)).XXH3_64bits
    except (ImportError, OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    for length in (3, 200, 5_000):
        sample = np.arange(length, dtype=np.uint8)
        if function(sample.ctypes.data, length) != xxhash.xxh3_64_intdigest(sample.data):
            return None
    return cast("Callable[[int, int], int]", function)


def _view(address: int, length_bytes: int) -> Any:
    return (ctypes.c_uint8 * length_bytes).from_address(address)


def segment_sums(
    table: SegmentTable, addresses: NDArray[np.uint64], checksum: Checksum = "xxh3", threads: int | None = None
) -> NDArray[np.uint64]:
    """Return the checksum of every segment, u64 [segments], of storages that lie at `addresses` in host memory.

    Large sets are hashed by up to `threads` threads (None = the CPUs, at most 4). Returns when every byte was read.
    """
    sums: NDArray[np.uint64] = np.zeros(len(table), np.uint64)
    places = (addresses[table.storage] + table.offset_bytes).tolist()
    lengths, compute = table.length_bytes.tolist(), host_sums(checksum)

    def fill(begin: int, end: int) -> None:
        sums[begin:end] = compute(places[begin:end], lengths[begin:end])

    if threads is None:
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if threads < 2 or table.total_bytes < _THREADED_BYTES:
        fill(0, len(table))
        return sums
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="tensorhub-sums") as pool:
            for part in [pool.submit(fill, *cut) for cut in itertools.pairwise(_even_parts(table, threads))]:
                part.result()
    except RuntimeError:  # the system allows no more threads
        fill(0, len(table))
    return sums


def cut_sums(
    cuts: Cuts, table: SegmentTable, addresses: NDArray[np.uint64], checksum: Checksum = "xxh3"
) -> NDArray[np.uint64]:
    """Return the checksum of every cut's bytes, u64 [cuts], of storages that lie at `addresses` in host memory.

    The cuts lie inside the segments of `table` (`unpack_cuts`). The runs of one cut at a time are gathered, so this
    takes as much memory as the largest cut has bytes, at most `segment_bytes`. The storages stay as they are until
    this returns. Any thread.
    """
    begins = (addresses[table.storage[cuts.segment]] + table.offset_bytes[cuts.segment]).astype(np.int64)
    begins += cuts.offset_bytes
    compute, lengths = host_sums(checksum), cuts.length_bytes
    sums: NDArray[np.uint64] = np.zeros(len(cuts), np.uint64)
    several = cuts.count > 1
    one = np.flatnonzero(~several)
    sums[one] = compute(begins[one].tolist(), lengths[one].tolist())
    scratch: NDArray[np.uint8] = np.empty(int(lengths[several].max(initial=0)), np.uint8)
    for cut in np.flatnonzero(several).tolist():
        count, run, stride = int(cuts.count[cut]), int(cuts.run_bytes[cut]), int(cuts.stride_bytes[cut])
        span = np.frombuffer(_view(int(begins[cut]), (count - 1) * stride + run), np.uint8)
        runs = np.lib.stride_tricks.as_strided(span, (count, run), (stride, 1), writeable=False)
        np.copyto(scratch[: count * run].reshape(count, run), runs)
        sums[cut] = compute([scratch.ctypes.data], [count * run])[0]
    return sums


def _even_parts(table: SegmentTable, parts: int) -> list[int]:
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


def unpack_first_sums(data: bytes, table: SegmentTable) -> NDArray[np.uint64]:
    """Return checksums of which only the first were heard, the others 0; raises CorruptTransfer if there are too many.

    The array may be written to.
    """
    count, odd = divmod(len(data), 8)
    if odd or count > len(table):
        raise CorruptTransfer(f"expected at most {len(table):,} checksums of 8 bytes, got {len(data):,} bytes")
    sums: NDArray[np.uint64] = np.zeros(len(table), np.uint64)
    sums[:count] = np.frombuffer(data, "<u8")
    return sums
