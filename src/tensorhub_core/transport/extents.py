"""Check runs against registered memory, with the regions sorted once instead of at every read; pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Region

_REGION_BYTES = 16


class Extents:
    """The bytes that a set of regions covers, by device."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._bounds: dict[str, tuple[NDArray[np.uint64], NDArray[np.uint64]]] = {}
        self._lists: dict[str, tuple[list[int], list[int]]] = {}
        for device in {region.device for region in regions}:
            ours = [(r.address, r.address + r.length_bytes) for r in regions if r.device == device]
            self._add(device, *np.array(ours, np.uint64).T)

    @classmethod
    def unpack(cls, data: bytes, device: str = "cpu") -> Extents:
        """Return the extents of packed regions from anyone; raises TransportError if they cannot be memory."""
        if len(data) % _REGION_BYTES:
            raise TransportError("a peer's description names its memory in half")
        low, length = np.frombuffer(data, "<u8").astype(np.uint64).reshape(-1, 2).T
        if bool((low == 0).any()) or bool((length > np.uint64(2**64 - 1) - low).any()):
            raise TransportError("a peer's description names memory that cannot exist")
        extents = cls(())
        if len(low):
            extents._add(device, low, low + length)
        return extents

    def cover(self, addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64], device: str) -> bool:
        """Tell whether every run [runs] lies inside one of the regions."""
        if device not in self._bounds:
            return False
        if self._in_one(addresses, length_bytes, device):
            return True
        low, high = self._bounds[device]
        at = np.searchsorted(low, addresses, side="right")
        if not at.all():
            return False
        end = high[at - 1]
        # Not `addresses + length_bytes <= end`, which a run beyond the end of the address space would pass.
        return bool(((addresses <= end) & (length_bytes <= end - addresses)).all())

    def _in_one(self, addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64], device: str) -> bool:
        """Tell whether all runs lie in one region, as they nearly always do.

        Searching the place of each gives up the interpreter lock, and getting it back takes longer than that.
        """
        if not len(addresses):
            return False
        lows, highs = self._lists[device]
        at = bisect_right(lows, int(addresses.min()))
        if not at or int(addresses.max()) > highs[at - 1]:
            return False
        return bool((length_bytes <= np.uint64(highs[at - 1]) - addresses).all())

    def _add(self, device: str, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> None:
        order = np.argsort(low, kind="stable")
        # A region may lie inside another: compare with the furthest end of all that begin no later.
        self._bounds[device] = low, high = low[order], np.maximum.accumulate(high[order])
        self._lists[device] = low.tolist(), high.tolist()


def sound_regions(regions: Sequence[Region], only_cpu: str = "") -> list[Region]:
    """Return the regions that have bytes; raises TransportError for one that lies nowhere.

    `only_cpu` says why memory of a device is refused; empty = it is not.
    """
    for region in regions:
        if only_cpu and region.device != "cpu":
            raise TransportError(f"{only_cpu}, not {region.device!r}: use transport='nixl' or 'auto'")
        if region.length_bytes < 0 or (region.length_bytes and region.address <= 0):
            raise TransportError(f"{region} is not memory")
    return [region for region in regions if region.length_bytes]


def pack_regions(regions: Sequence[Region]) -> bytes:
    """Return regions as pairs of little-endian u64: address, length in bytes."""
    return np.array([(region.address, region.length_bytes) for region in regions], "<u8").tobytes()
