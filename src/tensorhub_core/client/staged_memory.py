"""Host memory in which a version waits to be installed: the twin of a worker's registered memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.device import device_bytes
from tensorhub_core.client.memory import RegisteredMemory, StorageMemory
from tensorhub_core.client.prefix_word import PrefixPage
from tensorhub_core.client.sums import segment_sums
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout, Placement
from tensorhub_core.transport.base import Region

_PAGE_BYTES = 4096
_ALIGN_BYTES = 64


class Arena:
    """One allocation cut into a run of bytes for each of `lengths`; pages are touched when they are first filled."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Allocate; raises MemoryError."""
        self.lengths = tuple(lengths)
        ends = np.cumsum([-(-length // _ALIGN_BYTES) * _ALIGN_BYTES for length in lengths], dtype=np.int64)
        total = max(_ALIGN_BYTES, int(ends[-1]) if len(ends) else 0)  # so that each has a place of its own
        memory = np.empty(total + _PAGE_BYTES, np.uint8)
        skip = -memory.ctypes.data % _PAGE_BYTES
        self._memory: NDArray[np.uint8] = memory[skip : skip + total]
        offsets = [0, *ends[:-1].tolist()]
        self.address: int = self._memory.ctypes.data
        self.buffers: tuple[NDArray[np.uint8], ...] = tuple(
            self._memory[offset : offset + length] for offset, length in zip(offsets, self.lengths, strict=True)
        )
        self.addresses: NDArray[np.uint64] = np.array(
            [self.address + offset if length else 0 for offset, length in zip(offsets, self.lengths, strict=True)],
            np.uint64,
        )

    def regions(self) -> list[Region]:
        """Return the region to register with a transport."""
        return [Region(self.address, self._memory.nbytes)]


class StagedMemory:
    """The same layout as the registered memory, dense and in host memory; its storages are in the layout's order."""

    def __init__(self, live: RegisteredMemory, arena: Arena, page: PrefixPage | None = None) -> None:
        """Lie in an arena whose runs are as long as the storages of `live`; the page shows how far a version is."""
        self.layout: Layout = live.layout
        self.table: SegmentTable = live.table
        self.total_bytes: int = live.total_bytes
        self.addresses: NDArray[np.uint64] = arena.addresses
        self.buffers: tuple[NDArray[np.uint8] | None, ...] = arena.buffers
        self.devices: tuple[str, ...] = ("cpu",) * len(arena.buffers)
        self.page: PrefixPage = PrefixPage() if page is None else page
        self._arena = arena
        self._live = live

    def placement(self, transport: str, agent: bytes) -> bytes:
        """Return the placement blob: where peers find the storages through the transport's agent."""
        addresses = self.addresses.astype("<u8").tobytes()
        devices, word = bytes(len(self.devices)), self.page.address if agent else 0
        return msgspec.msgpack.encode(Placement(transport, agent, addresses, ("cpu",), devices, word))

    def collect(self) -> None:
        """Take over what a read of another layout does not fill: the bytes outside of every box (padding)."""
        for index in padded_storages(self.layout):
            storage = self._live.storages[index]
            if storage.shadow is not None:
                storage.shadow.collect()
            self._live.synchronize()
            np.copyto(self._arena.buffers[index], _host_bytes(storage))

    def spread(self) -> None:
        """Do nothing: readers of this memory see the dense form."""

    def sums(self) -> NDArray[np.uint64]:
        """Return the checksum of every segment, u64 [segments], of what the memory holds now."""
        return segment_sums(self.table, self.addresses, self.layout.checksum)


def storage_lengths(memory: RegisteredMemory) -> tuple[int, ...]:
    """Return the bytes of each storage."""
    return tuple(storage.length_bytes for storage in memory.storages)


def padded_storages(layout: Layout) -> Iterator[int]:
    """Yield the storages that have elements outside of the boxes of all tensors which share them."""
    for index, group in enumerate(layout.storages):
        specs = [layout.tensors[number] for number in group]
        # Boxes of one tensor never overlap, so that their volumes add up to what they cover.
        covered = [prod(spec.shape) if spec.boxes is None else sum(prod(b.shape) for b in spec.boxes) for spec in specs]
        if max(covered) < prod(specs[0].shape):
            yield index


def _host_bytes(storage: StorageMemory) -> NDArray[np.uint8]:
    if storage.buffer is not None:
        return storage.buffer
    return np.frombuffer(device_bytes(storage.view.device, storage.address, storage.length_bytes), np.uint8)
