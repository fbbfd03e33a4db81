"""Copy a version into other host memory and check the copy: what is left of it when its registered memory changes."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.device import device_bytes
from tensorhub_core.client.installing import copy_threads
from tensorhub_core.client.memory import FilledMemory
from tensorhub_core.client.staged_memory import Arena
from tensorhub_core.client.sums import Sums, host_sums, unpack_sums
from tensorhub_core.errors import CorruptTransfer, TransportError
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Placement
from tensorhub_core.limits import start_thread
from tensorhub_core.state.messages import Held, PutBlob
from tensorhub_core.transport.base import Transport

BATCH_BYTES = 8 << 20
"""What a thread copies and checks between two looks at whether it has to stop; checked while it is in a cache."""

ReadDevice = Callable[[str, int, int], memoryview]
"""Return a run of device memory, (device, address, length_bytes)."""


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """What is to be copied: memory that holds version `key`, and the blobs that describe it to the server."""

    key: VersionKey
    memory: FilledMemory
    layout: PutBlob
    sums: PutBlob
    portable: bool = True
    gone: Callable[[], str | None] = lambda: None
    """Names a tensor whose memory was given back to the system since it was registered."""
    trusted: bool = True
    """The caller has not been told that the memory is free again."""
    converted: bool = False
    """It is not in the dtypes of the version's publisher."""

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all storages."""
        return self.memory.table.total_bytes


class OffloadMemory:
    """An arena with the layout of an original, and a data plane of its own that serves it."""

    def __init__(self, original: Original, transport: Transport) -> None:
        """Allocate, and let peers reach the memory; raises MemoryError, TransportError. Takes the transport over."""
        self._transport = transport
        table = original.memory.table
        self.layout, self.table = original.memory.layout, table
        self._arena = Arena(storage_lengths(table, len(original.memory.devices)))
        transport.register(self._arena.regions())
        agent = transport.describe()  # of empty tensors too: the server knows copies by where they lie
        self.addresses: NDArray[np.uint64] = self._arena.addresses
        self.devices: tuple[str, ...] = ("cpu",) * len(self.addresses)
        addresses = self._arena.addresses.astype("<u8").tobytes()
        devices = bytes(len(self._arena.addresses))
        data = msgspec.msgpack.encode(Placement(transport.name, agent, addresses, ("cpu",), devices))
        self.placement = PutBlob(digest_of(data), data)
        digests = (original.layout.digest, self.placement.digest, original.sums.digest)
        sizes = (original.total_bytes, len(table))
        self.held = Held(*original.key, *digests, *sizes, original.portable, original.converted)
        """What a hello says of the copy."""

    def fill(
        self,
        original: Original,
        stop: Callable[[], bool],
        *,
        check: bool = True,
        read_device: ReadDevice = device_bytes,
        threads: int | None = None,
    ) -> bool:
        """Copy the original by several threads and compare it with its checksums; return False if `stop()` came first.

        Raises CorruptTransfer if the original is not what its checksums say, or whatever a device raises.
        """
        name = original.gone()
        if name is not None:
            raise CorruptTransfer(
                f"the memory of {name!r} was freed or resized while version {original.key[1]} lay in it"
            )
        copying = _Copying(original, self._arena, stop, check, read_device)
        copying.run(copy_threads() if threads is None else threads)
        return not copying.stopped

    def close(self) -> None:
        """Cut the readers off, so that the memory may be freed; raises what went wrong: then it may not."""
        self._transport.shutdown()


def storage_lengths(table: SegmentTable, storages: int) -> list[int]:
    """Return the bytes of each storage; its segments cover it."""
    lengths = np.zeros(storages, np.uint64)
    np.add.at(lengths, table.storage, table.length_bytes)
    return [int(length) for length in lengths]


@dataclass(slots=True)
class _Copying:
    original: Original
    arena: Arena
    stop: Callable[[], bool]
    check: bool
    read_device: ReadDevice
    stopped: bool = False
    error: BaseException | None = None
    expected: NDArray[np.uint64] = field(init=False)
    compute: Sums = field(init=False)
    batches: Iterator[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        table = self.original.memory.table
        self.expected = unpack_sums(self.original.sums.data, table)
        self.compute = host_sums(self.original.memory.layout.checksum)
        self.batches = iter(batches_of(table))

    def run(self, threads: int) -> None:
        """Copy everything; raises what went wrong in any thread."""
        helpers: list[threading.Thread] = []
        with contextlib.suppress(TransportError):  # those that there are do it all
            for _ in range(threads - 1):
                helper = threading.Thread(target=self._copy, name="tensorhub-offload-helper", daemon=True)
                start_thread(helper)
                helpers.append(helper)
        self._copy()
        for helper in helpers:
            helper.join()
        if self.error is not None:
            raise self.error

    def _copy(self) -> None:
        try:
            for begin, end in self.batches:
                if self.error is not None or self.stopped:
                    return
                if self.stop():
                    self.stopped = True
                    return
                self._copy_batch(begin, end)
        except BaseException as error:
            self.error = error

    def _copy_batch(self, begin: int, end: int) -> None:
        memory, table = self.original.memory, self.original.memory.table
        storage = table.storage[begin:end]
        offsets, lengths = table.offset_bytes[begin:end], table.length_bytes[begin:end]
        targets = (self.arena.addresses[storage] + offsets).tolist()
        sources = (memory.addresses[storage] + offsets).tolist()
        move = ctypes.memmove  # gives up the interpreter lock while it copies
        for first, after in runs_of(storage, offsets, lengths):
            number, length = int(storage[first]), int(lengths[first:after].sum())
            if memory.buffers[number] is not None:
                move(targets[first], sources[first], length)
            else:
                data = self.read_device(memory.devices[number], sources[first], length)
                at = int(offsets[first])
                np.copyto(self.arena.buffers[number][at : at + length], np.frombuffer(data, np.uint8))
        if self.check and not np.array_equal(self.compute(targets, lengths.tolist()), self.expected[begin:end]):
            raise CorruptTransfer(
                f"the memory does not hold the bytes of version {self.original.key[1]} any more: it was changed before "
                "unpublish() returned"
            )


def batches_of(table: SegmentTable, batch_bytes: int = BATCH_BYTES) -> list[tuple[int, int]]:
    """Cut the segments, by number, into runs of about `batch_bytes`."""
    ends = np.cumsum(table.length_bytes)
    goals = np.arange(batch_bytes, int(table.total_bytes) + batch_bytes, batch_bytes, dtype=np.uint64)
    cuts = np.unique(np.minimum(np.searchsorted(ends, goals) + 1, len(table)))
    return list(zip([0, *cuts[:-1].tolist()], cuts.tolist(), strict=True)) if len(table) else []


def runs_of(
    storage: NDArray[np.int32], offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]
) -> Sequence[tuple[int, int]]:
    """Put neighbours in one storage together: (first, after the last) of each run of segments that lie in a row."""
    joins = (storage[1:] == storage[:-1]) & (offsets[:-1] + lengths[:-1] == offsets[1:])
    starts = [0, *(np.flatnonzero(~joins) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(storage)], strict=True))
