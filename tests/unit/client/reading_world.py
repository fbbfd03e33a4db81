"""A source and a destination in this process, joined by the memory transport, for tests of the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.reading import Destination, SourceAccess
from tensorhub_core.layout.cuts import Cuts, no_cuts
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.types import Box, Checksum
from tensorhub_core.transport.base import Transport
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport

SENTINEL = 0xA5
Tensors = Mapping[str, NDArray[np.generic]]


@dataclass
class Holder:
    """A worker's memory behind a transport of its own."""

    tensors: Tensors
    transport: Transport
    memory: RegisteredMemory
    description: bytes = b""

    def access(self, lease: str = "lease", prefix: int | None = None) -> SourceAccess:
        """Return this memory as a leased source, with the checksums of what it holds now."""
        memory = self.memory
        sums = memory.sums()
        return SourceAccess(
            lease=lease,
            replica=lease,
            description=self.description,
            layout=memory.layout,
            table=memory.table,
            addresses=memory.addresses,
            devices=memory.devices,
            sums=sums,
            prefix=len(sums) if prefix is None else prefix,
        )

    def destination(self) -> Destination:
        """Return this memory as what is filled."""
        memory = self.memory
        return Destination(memory.layout, memory.table, memory.addresses, memory.devices, memory.buffers)

    def holds(self, tensors: Tensors) -> bool:
        """Tell whether every tensor is bytewise equal to the one of the same name."""
        return all(self.tensors[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())

    def untouched(self) -> bool:
        """Tell whether every byte is still the sentinel."""
        return all((tensor.reshape(-1).view(np.uint8) == SENTINEL).all() for tensor in self.tensors.values())


@dataclass
class Network:
    """Holders that can reach each other."""

    network: MemoryNetwork = field(default_factory=MemoryNetwork)

    def holder(
        self,
        tensors: Tensors,
        *,
        boxes: Mapping[str, Sequence[Box]] | None = None,
        shard: int = 0,
        num_shards: int = 1,
        segment_bytes: int = 4096,
        transport: Transport | None = None,
        checksum: Checksum | None = None,
    ) -> Holder:
        """Register tensors with a transport and describe it."""
        place = {"shard": shard, "num_shards": num_shards, "segment_bytes": segment_bytes}
        memory = RegisteredMemory(tensors, boxes, **place, checksum=checksum)
        transport = MemoryTransport(self.network) if transport is None else transport
        transport.register(memory.regions())
        return Holder(tensors, transport, memory, transport.describe())


def model(seed: int, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, NDArray[np.generic]]:
    """Return tensors of random bytes."""
    chance = np.random.default_rng(seed)
    item = np.dtype(dtype)
    return {
        name: np.frombuffer(chance.bytes(int(np.prod(shape, dtype=int)) * item.itemsize), item).reshape(shape).copy()
        for name, shape in shapes.items()
    }


def empty_like(tensors: Tensors) -> dict[str, NDArray[np.generic]]:
    """Return tensors of the same shapes, filled with the sentinel."""
    empty = {name: np.empty_like(tensor) for name, tensor in tensors.items()}
    for tensor in empty.values():
        tensor.reshape(-1).view(np.uint8)[:] = SENTINEL
    return empty


def plan_of(*columns: Any, cut: NDArray[np.int32] | None = None, cuts: Cuts | None = None) -> ReadPlan:
    """Return a plan written out, in which nothing is cut unless it is said."""
    whole = np.full(len(columns[1]), -1, np.int32)
    return ReadPlan(*columns, whole if cut is None else cut, no_cuts() if cuts is None else cuts)


class Record:
    """An observer that remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int, str]] = []

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Remember."""
        self.heard.append((prefix, done_bytes, total_bytes, lease))
