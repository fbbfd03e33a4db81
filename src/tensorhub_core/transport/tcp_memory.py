"""Name memory by its address, as `struct iovec`s that sockets send from and receive into."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.extents import sound_regions
from tensorhub_core.transport.process_memory import iovecs

MOST_RUNS_OF_A_CALL = 1024
"""What one system call takes (UIO_MAXIOV)."""
_MOST_ADDRESS = 1 << 62


def sound(regions: Sequence[Region]) -> list[Region]:
    """Return the regions that have bytes; raises TransportError for one that sockets cannot reach."""
    found = sound_regions(regions, "the tcp transport moves only CPU memory")
    for region in found:
        if region.address + region.length_bytes > _MOST_ADDRESS:
            raise TransportError(f"{region} lies where no process has memory")
    return found


def merge(
    addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the same bytes in the same order as fewer runs: neighbours are joined, empty runs left out."""
    if not length_bytes.all():
        addresses, length_bytes = addresses[length_bytes > 0], length_bytes[length_bytes > 0]
    if len(addresses) < 2:
        return addresses, length_bytes
    first = np.empty(len(addresses), np.bool_)
    first[0] = True
    np.not_equal(addresses[1:], addresses[:-1] + length_bytes[:-1], out=first[1:])
    begins = np.flatnonzero(first)
    return addresses[begins], np.add.reduceat(length_bytes, begins)


class Vector:
    """Runs of memory that are sent or filled from the front, a part at a time."""

    __slots__ = ("_at", "_bytes", "_done", "_ends", "_iovecs", "_parts", "total_bytes")

    def __init__(self) -> None:
        """Begin with nothing."""
        self._iovecs: NDArray[np.uint64] = np.empty((0, 2), np.uint64)
        self._parts: list[NDArray[np.uint64]] = []
        """What was appended since the vector was last looked at."""
        self._bytes: list[NDArray[np.uint8]] = []
        """Keeps the memory of what was appended as bytes."""
        self._ends: list[int] = []
        self._at = 0
        self._done = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        """Return how many runs there are in all."""
        return len(self._ends)

    def add_bytes(self, data: bytes) -> None:
        """Append bytes that lie nowhere else."""
        kept = np.frombuffer(data, np.uint8)
        self._bytes.append(kept)
        self._parts.append(iovecs(1, kept))
        self.total_bytes += len(data)
        self._ends.append(self.total_bytes)

    def add_runs(self, addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64]) -> None:
        """Append runs [runs]."""
        addresses, length_bytes = merge(addresses, length_bytes)
        if not len(addresses):
            return
        part = np.empty((len(addresses), 2), np.uint64)
        part[:, 0], part[:, 1] = addresses, length_bytes
        self._parts.append(part)
        base = self.total_bytes
        if base:
            self._ends += [base + end for end in np.cumsum(length_bytes).tolist()]
        else:
            self._ends = np.cumsum(length_bytes).tolist()
        self.total_bytes = self._ends[-1]

    @property
    def left_bytes(self) -> int:
        """Return how many bytes are still to go."""
        return self.total_bytes - self._done

    def front(self, most_bytes: int, most_runs: int = MOST_RUNS_OF_A_CALL) -> NDArray[np.uint64]:
        """Return the next bytes within both bounds, u64 [runs, 2] of addresses and lengths: `struct iovec`s."""
        if self._parts:
            self._iovecs = np.concatenate([self._iovecs, *self._parts]) if len(self._iovecs) else _joined(self._parts)
            self._parts = []
        at, end, ends = self._at, self._done + most_bytes, self._ends
        stop = min(bisect_left(ends, end, at) + 1, at + most_runs, len(ends))
        runs = self._iovecs[at:stop].copy()
        if stop > at:
            begun = self._done - (ends[at - 1] if at else 0)
            if begun:
                runs[0, 0] += np.uint64(begun)
                runs[0, 1] -= np.uint64(begun)
            beyond = ends[stop - 1] - end
            if beyond > 0:
                runs[-1, 1] -= np.uint64(beyond)
        return runs

    def advance(self, count: int) -> None:
        """Count bytes that went."""
        self._done += count
        self._at = bisect_right(self._ends, self._done, self._at)


def _joined(parts: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
