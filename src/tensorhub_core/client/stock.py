"""Memory that holds a version under the commitment not to change it, and the checksums of parts of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.device import DeviceMemory
from tensorhub_core.client.sums import cut_sums, host_sums, unpack_sums
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.cuts import Cuts
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout
from tensorhub_core.state.messages import PutBlob

BATCH_BYTES = 8 << 20
"""Segments that are compared between two looks at whether to stop; while they are in a cache."""


class HeldMemory(Protocol):
    """Where a version lies: registered, staging or offload memory; see `RegisteredMemory`."""

    @property
    def layout(self) -> Layout: ...
    @property
    def table(self) -> SegmentTable: ...
    @property
    def addresses(self) -> NDArray[np.uint64]: ...
    @property
    def devices(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Stock:
    """A version that is offered: the digests of its layout and placement, its manifest, and its memory.

    Two are equal if they are the same version in the same place.
    """

    layout: bytes
    placement: bytes
    sums: PutBlob
    memory: HeldMemory


def sum_cuts(
    stock: Stock, asked: Sequence[Cuts], stop: Callable[[], bool], devices: DeviceMemory
) -> list[NDArray[np.uint64]] | None:
    """Return the checksums of several sets of cuts, u64 [cuts] each; None if `stop()` came first.

    After the cuts of a segment its own checksum is computed: bytes that had changed by then are not vouched for. Raises
    CorruptTransfer naming the segment, or whatever a device raises.
    """
    manifest = unpack_sums(stock.sums.data, stock.memory.table)
    found = [np.zeros(len(cuts), np.uint64) for cuts in asked]
    orders = [np.argsort(cuts.segment, kind="stable") for cuts in asked]
    sorted_ = [cuts.segment[order] for cuts, order in zip(asked, orders, strict=True)]
    every = np.unique(np.concatenate([cuts.segment for cuts in asked]))
    for segments in _batches(every, stock.memory.table):
        if stop():
            return None
        for number, cuts in enumerate(asked):
            begin, end = np.searchsorted(sorted_[number], (segments[0], segments[-1] + 1))
            mine = orders[number][begin:end]
            found[number][mine] = _sums_of_cuts(stock.memory, cuts.take(mine), devices)
        wrong = _wrong_of(stock.memory, segments, manifest, devices)
        if len(wrong):
            raise CorruptTransfer(_changed(stock.memory, int(wrong[0]), len(wrong)))
    return found


def _wrong_of(
    memory: HeldMemory, segments: NDArray[np.int64], manifest: NDArray[np.uint64], devices: DeviceMemory
) -> NDArray[np.int64]:
    """Return those of some segments that are not what they were when they were published."""
    differs: NDArray[np.bool_] = _sums_of_segments(memory, segments, devices) != manifest[segments]
    return np.asarray(segments[differs], np.int64)


def _batches(segments: NDArray[np.int64], table: SegmentTable) -> list[NDArray[np.int64]]:
    ends = np.cumsum(table.length_bytes[segments].astype(np.int64))
    cuts = np.flatnonzero(np.diff((ends - 1) // BATCH_BYTES)) + 1
    return [batch for batch in np.split(segments, cuts) if len(batch)]


def _sums_of_cuts(memory: HeldMemory, cuts: Cuts, devices: DeviceMemory) -> NDArray[np.uint64]:
    """Sum cuts where they lie."""
    storages, checksum = memory.table.storage[cuts.segment], memory.layout.checksum
    sums: NDArray[np.uint64] = np.zeros(len(cuts), np.uint64)
    for device, mine in _by_device(memory, storages):
        here = cuts.take(mine)
        if device == "cpu":
            sums[mine] = cut_sums(here, memory.table, memory.addresses, checksum)
            continue
        begins = (memory.addresses[storages[mine]] + memory.table.offset_bytes[here.segment]).astype(np.int64)
        columns = (begins + here.offset_bytes, here.run_bytes, here.stride_bytes, here.count)
        runs = list(zip(*(column.tolist() for column in columns), strict=True))
        sums[mine] = devices.cut_checksums(checksum, device, runs)
    return sums


def _sums_of_segments(memory: HeldMemory, segments: NDArray[np.int64], devices: DeviceMemory) -> NDArray[np.uint64]:
    table, checksum = memory.table, memory.layout.checksum
    storages = table.storage[segments]
    sums: NDArray[np.uint64] = np.zeros(len(segments), np.uint64)
    for device, mine in _by_device(memory, storages):
        addresses = (memory.addresses[storages[mine]] + table.offset_bytes[segments[mine]]).tolist()
        lengths = table.length_bytes[segments[mine]].tolist()
        if device == "cpu":
            sums[mine] = host_sums(checksum)(addresses, lengths)
        else:
            sums[mine] = devices.checksums(checksum, device, list(zip(addresses, lengths, strict=True)))
    return sums


def _by_device(memory: HeldMemory, storages: NDArray[np.int32]) -> list[tuple[str, NDArray[np.intp]]]:
    """Return which of some storages lie on which device."""
    names = sorted(set(memory.devices))
    if len(names) == 1:
        return [(names[0], np.arange(len(storages)))]
    codes = np.array([names.index(device) for device in memory.devices])[storages]
    return [(name, np.flatnonzero(codes == code)) for code, name in enumerate(names) if (codes == code).any()]


def _changed(memory: HeldMemory, segment: int, count: int) -> str:
    table, layout = memory.table, memory.layout
    name = layout.tensors[layout.storages[int(table.storage[segment])][0]].name
    more = f" and {count - 1} more near it" if count > 1 else ""
    return (
        f"segment {segment} (of {name!r}, from byte {int(table.offset_bytes[segment]):,} on){more} does not match its "
        "checksum any more: the memory was changed while it was published"
    )
