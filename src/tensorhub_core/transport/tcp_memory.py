"""Look at memory by its address, as views that sockets send from and receive into."""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.extents import sound_regions

MOST_VIEWS = 1024
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


def address_space() -> memoryview:
    """Return all memory as one view, indexed by address: a slice of it is a run. Nothing is touched before it is."""
    return memoryview((ctypes.c_ubyte * _MOST_ADDRESS).from_address(0)).cast("B")


class Vector:
    """Runs of memory that are sent or filled from the front, a part at a time."""

    __slots__ = ("_at", "_done", "_ends", "_space", "_views", "total_bytes")

    def __init__(self, space: memoryview) -> None:
        """Begin with nothing; `space` is where runs lie."""
        self._space = space
        self._views: list[memoryview] = []
        self._ends: list[int] = []
        self._at = 0
        self._done = 0
        self.total_bytes = 0

    def __len__(self) -> int:
        """Return how many views there are in all."""
        return len(self._views)

    def add_bytes(self, data: bytes) -> None:
        """Append bytes that lie nowhere else."""
        self.total_bytes += len(data)
        self._views.append(memoryview(data))
        self._ends.append(self.total_bytes)

    def add_runs(self, addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64]) -> None:
        """Append runs [runs]."""
        addresses, length_bytes = merge(addresses, length_bytes)
        if not len(addresses):
            return
        space = self._space
        ends = (addresses + length_bytes).tolist()
        self._views += [space[begin:end] for begin, end in zip(addresses.tolist(), ends, strict=True)]
        self._ends += (np.cumsum(length_bytes) + np.uint64(self.total_bytes)).tolist()
        self.total_bytes = self._ends[-1]

    @property
    def left_bytes(self) -> int:
        """Return how many bytes are still to go."""
        return self.total_bytes - self._done

    def front(self, most_bytes: int, most_views: int = MOST_VIEWS) -> list[memoryview]:
        """Return views of the next bytes, within both bounds."""
        at, end = self._at, self._done + most_bytes
        stop = min(bisect_left(self._ends, end, at) + 1, at + most_views)
        views = self._views[at:stop]
        if views:
            begun = self._done - (self._ends[at - 1] if at else 0)
            if begun:
                views[0] = views[0][begun:]
            beyond = self._ends[at + len(views) - 1] - end
            if beyond > 0:
                views[-1] = views[-1][: len(views[-1]) - beyond]
        return views

    def advance(self, count: int) -> None:
        """Count bytes that went."""
        self._done += count
        self._at = bisect_right(self._ends, self._done, self._at)
