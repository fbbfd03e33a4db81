"""Peers and a choosing reader inside one process: members by every name that can be made to refuse or to fail."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.auto import AutoTransport
from tensorhub_core.transport.auto_members import Surroundings
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Region
from tensorhub_core.transport.description import decode_description
from tensorhub_core.transport.host import Host
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport

SIZE = 1 << 16
HERE = Host("boot", 1, 1)
THERE = Host("another", 1, 1)


class Member(MemoryTransport):
    """A transport of any name. `refuse` names calls that raise; `fail` reads are reported failed, and still move."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        super().__init__(network)
        self.name = name
        self.refuse: set[str] = set()
        self.fail = 0
        self.posts = self.fences = self.attaches = 0
        self.regions: list[Region] = []
        self.lent: list[Region] = []
        self._failed: set[ReadId] = set()

    def register(self, regions: Sequence[Region]) -> None:
        self._maybe_refuse("register")
        super().register([Region(r.address, r.length_bytes) for r in regions])
        self.regions += regions

    def register_local(self, regions: Sequence[Region]) -> None:
        self._maybe_refuse("register_local")
        super().register_local([Region(r.address, r.length_bytes) for r in regions])
        self.lent = list(regions)

    def attach(self, description: bytes) -> PeerId:
        self.attaches += 1
        self._maybe_refuse("attach")
        decode_description(description, self.name)
        return super().attach(description)

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        self._maybe_refuse("post")
        self.posts += 1
        read = super().post(peer, Batch(batch.local, batch.remote, batch.length_bytes))
        if self.fail:
            self.fail -= 1
            self._failed.add(read)
        return read

    def poll(self, read: ReadId) -> Progress:
        if read in self._failed:
            return Progress(ReadState.FAILED, f"{self.name} is broken")
        return super().poll(read)

    def fence(self) -> None:
        self.fences += 1
        self._maybe_refuse("fence")
        super().fence()

    def revoke(self) -> None:
        super().revoke()
        self.regions = []

    def _maybe_refuse(self, call: str) -> None:
        if call in self.refuse:
            raise TransportError(f"{self.name} does not {call}")


class Side:
    """An `auto` transport with u8 [SIZE] of registered memory."""

    def __init__(
        self,
        network: MemoryNetwork,
        *,
        host: Host | None = HERE,
        nixl: bool = True,
        rdma: bool = False,
        missing: Sequence[str] = (),
        device: str = "cpu",
        fill: Callable[[], NDArray[np.uint8]] = lambda: np.zeros(SIZE, np.uint8),
    ) -> None:
        self.members: dict[str, Member] = {}
        self._network, self._missing = network, missing
        self.auto = AutoTransport(secrets.token_hex(4), make=self.make, around=lambda: Surroundings(host, nixl, rdma))
        self.memory = fill()
        self.region = Region(self.memory.ctypes.data, SIZE, device)

    def make(self, way: str) -> Member:
        """Make a member, or say that it is missing."""
        if way in self._missing:
            raise TransportError(f"{way} is not installed")
        self.members[way] = Member(self._network, way)
        return self.members[way]

    def serve(self) -> bytes:
        """Register the memory and describe it."""
        self.auto.register([self.region])
        return self.auto.describe()

    def batch(self, there: Side, length: int = SIZE) -> Batch:
        """Return a read of the other side's memory into this one's."""
        runs = [np.array([value], np.uint64) for value in (self.region.address, there.region.address, length)]
        return Batch(*runs, self.region.device, there.region.device)

    def end_of(self, read: ReadId) -> Progress:
        """Poll a read to its end."""
        for _ in range(10_000):
            progress = self.auto.poll(read)
            if progress.state is not ReadState.ACTIVE:
                return progress
        raise AssertionError("the read does not end")

    def read(self, peer: PeerId, there: Side) -> str:
        """Read all of the other side's memory, check it, and name the member that did it."""
        before = {way: member.posts for way, member in self.members.items()}
        self.memory[:] = 0
        read = self.auto.post(peer, self.batch(there))
        progress = self.end_of(read)
        assert progress.state is ReadState.DONE, progress.error
        assert self.auto.close(read)
        assert np.array_equal(self.memory, there.memory)
        used = [way for way, member in self.members.items() if member.posts > before.get(way, 0)]
        return " then ".join(used)


def noise() -> NDArray[np.uint8]:
    """Return random bytes."""
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
