"""Move bytes inside one process: the reference that says what a transport does, and the simulator's network.

Bytes move only in `MemoryNetwork.step()`, which every `poll` calls, so a read that was closed early is as unquiet here
as on a network card: its bytes land with the next step, until its reader fences.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Region
from tensorhub_core.transport.description import decode_description, encode_description
from tensorhub_core.transport.extents import Extents, sound_regions

_UNBOUNDED = 1 << 62


@dataclass(slots=True)
class _Flight:
    """A read on its way: `moved` bytes of it have landed."""

    agent: str
    batch: Batch
    moved: int = 0
    progress: Progress = field(default_factory=lambda: Progress(ReadState.ACTIVE))


@dataclass(slots=True)
class _Agent:
    """A serving side: what it lets peers read, and whether it answers."""

    regions: tuple[Region, ...]
    stopped: bool = False


class MemoryNetwork:
    """Everything that transports of one process share; any thread.

    `step_bytes` is how much of each read moves in a step; None = all of it.
    """

    def __init__(self, step_bytes: int | None = None) -> None:
        self._step_bytes = _UNBOUNDED if step_bytes is None else step_bytes
        self._lock = threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._flights: dict[int, tuple[object, _Flight]] = {}
        self._names = 0
        self._posted = 0

    def step(self) -> None:
        """Move some bytes of every read that is in flight, also of those that were closed."""
        with self._lock:
            for number, (_, flight) in list(self._flights.items()):
                self._move(flight)
                if flight.progress.state is not ReadState.ACTIVE:
                    del self._flights[number]

    def kill(self, description: bytes) -> None:
        """End a serving side as if its process had died: reads from it fail."""
        self.remove(decode_description(description, MemoryTransport.name).agent)

    def stop(self, description: bytes, stopped: bool = True) -> None:
        """Stop a serving side as SIGSTOP does (its reads stay where they are), or let it go on."""
        agent = self._agents.get(decode_description(description, MemoryTransport.name).agent)
        if agent is not None:
            agent.stopped = stopped

    def new_name(self) -> str:
        """Return an agent's name that was never used."""
        with self._lock:
            self._names += 1
            return f"memory-{os.getpid()}-{self._names}"

    def serve(self, agent: str, regions: tuple[Region, ...]) -> None:
        """Let peers read these regions of an agent."""
        with self._lock:
            self._agents.setdefault(agent, _Agent(())).regions = regions

    def remove(self, agent: str) -> None:
        """Forget an agent: reads from it fail."""
        with self._lock:
            self._agents.pop(agent, None)

    def serves(self, agent: str, batch: Batch | None = None) -> bool:
        """Tell whether an agent is there and, given a batch, lets all of its runs be read."""
        with self._lock:
            found = self._agents.get(agent)
        if found is None or batch is None:
            return found is not None
        return covered(found.regions, batch.remote, batch.length_bytes, batch.remote_device)

    def launch(self, reader: object, agent: str, batch: Batch) -> tuple[int, _Flight]:
        """Put a read in flight; the first bytes move with the next step."""
        with self._lock:
            self._posted += 1
            flight = _Flight(agent, batch)
            self._flights[self._posted] = (reader, flight)
            return self._posted, flight

    def cancel(self, reader: object) -> None:
        """Take all reads of a reader out of flight."""
        with self._lock:
            self._flights = {n: (owner, flight) for n, (owner, flight) in self._flights.items() if owner is not reader}

    def _move(self, flight: _Flight) -> None:
        agent = self._agents.get(flight.agent)
        batch = flight.batch
        if agent is None:
            flight.progress = Progress(ReadState.FAILED, "the peer is gone")
        elif not covered(agent.regions, batch.remote, batch.length_bytes, batch.remote_device):
            flight.progress = Progress(ReadState.FAILED, "the peer no longer serves this memory")
        elif not agent.stopped:
            flight.moved = _copy(batch, flight.moved, self._step_bytes)
            if flight.moved == int(batch.length_bytes.sum()):
                flight.progress = Progress(ReadState.DONE)


class MemoryTransport:
    """The data plane inside one process; see `Transport`. Only CPU memory."""

    name = "memory"
    fills_devices = False

    def __init__(self, network: MemoryNetwork) -> None:
        """Join a network; peers find each other only within it."""
        self._network = network
        self._regions: list[Region] = []
        self._local: list[Region] = []
        self._serving: str | None = None
        self._peers: dict[PeerId, str] = {}
        self._reads: dict[ReadId, _Flight] = {}
        self._poisoned = False
        self._attached = 0
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        """Serve more regions."""
        self._check_open()
        added = sound_regions(regions, "the memory transport moves only CPU memory")
        if added:
            self._regions += added
            self._serving = self._serving or self._network.new_name()
            self._network.serve(self._serving, tuple(self._regions))

    def register_local(self, regions: Sequence[Region]) -> None:
        """Let reads write to staging memory."""
        self._check_open()
        self._check_no_reads()
        self._local = sound_regions(regions, "the memory transport moves only CPU memory")

    def deregister(self) -> None:
        """Serve nothing more; reads of peers fail."""
        self._check_open()
        self._check_no_reads()
        self._regions, self._local = [], []
        if self._serving is not None:
            self._network.serve(self._serving, ())

    def describe(self) -> bytes:
        """Return the serving side's name in the network."""
        self._check_open()
        if self._serving is None or not self._regions:
            raise TransportError("nothing is registered: register memory before describing it")
        return encode_description(self.name, self._serving, b"")

    def attach(self, description: bytes) -> PeerId:
        """Find a peer in the network."""
        self._check_open()
        agent = decode_description(description, self.name).agent
        if not self._network.serves(agent):
            raise TransportError(f"no agent {agent!r} is in this process's memory network")
        for peer in [peer for peer, known in self._peers.items() if known == agent]:
            self.detach(peer)
        self._attached += 1
        peer = PeerId(f"{agent}#{self._attached}")
        self._peers[peer] = agent
        return peer

    def detach(self, peer: PeerId) -> None:
        """Forget a peer."""
        self._check_open()
        self._peers.pop(peer, None)

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        """Put a read in flight."""
        self._check_open()
        if self._poisoned:
            raise TransportError("a read was closed before it had ended: fence() first")
        agent = self._peers.get(peer)
        if agent is None or not self._network.serves(agent):
            raise TransportError(f"{peer!r} is not attached, or gone")
        if not len(batch.local) == len(batch.remote) == len(batch.length_bytes) > 0:
            raise TransportError("a batch needs as many local as remote runs, and at least one")
        here = tuple(self._regions + self._local)
        if not covered(here, batch.local, batch.length_bytes, batch.local_device):
            raise TransportError("a run lies outside the memory registered here")
        if not self._network.serves(agent, batch):
            raise TransportError("a run lies outside the memory that the peer registered")
        number, flight = self._network.launch(self, agent, batch)
        self._reads[ReadId(number)] = flight
        return ReadId(number)

    def poll(self, read: ReadId) -> Progress:
        """Let the network make a step and say where a read stands."""
        self._check_open()
        flight = self._reads.get(read)
        if flight is None:
            return Progress(ReadState.FAILED, "the read is unknown: it was closed, or ended by a fence")
        if flight.progress.state is ReadState.ACTIVE:
            self._network.step()
        return flight.progress

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Wait: only polling moves bytes."""
        time.sleep(timeout_s)

    def close(self, read: ReadId) -> bool:
        """Forget a read; one that has not ended keeps moving bytes, as on a network card."""
        self._check_open()
        flight = self._reads.pop(read, None)
        if flight is None or flight.progress.state is ReadState.DONE:
            return True
        self._poisoned = True
        return False

    def fence(self) -> None:
        """Take this reader's reads out of flight."""
        self._check_open()
        self._network.cancel(self)
        self._reads.clear()
        self._peers.clear()
        self._poisoned = False

    def revoke(self) -> None:
        """Leave the network as a serving side."""
        self._check_open()
        self._regions = []
        if self._serving is not None:
            self._network.remove(self._serving)
            self._serving = None

    def shutdown(self) -> None:
        """Leave the network."""
        if not self._closed:
            self.fence()
            self.revoke()
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the transport was shut down")

    def _check_no_reads(self) -> None:
        if self._reads or self._poisoned:
            raise TransportError("a read is in flight: close all reads and fence() first")


def covered(
    regions: Sequence[Region], addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64], device: str
) -> bool:
    """Tell whether every run [runs] lies inside one of the regions."""
    return Extents(regions).cover(addresses, length_bytes, device)


def _copy(batch: Batch, moved: int, budget: int) -> int:
    """Copy up to `budget` bytes behind the first `moved` ones of a batch; returns how many have moved then."""
    at = 0
    for local, remote, length in zip(
        batch.local.tolist(), batch.remote.tolist(), batch.length_bytes.tolist(), strict=True
    ):
        start = max(0, moved - at)
        if start < length:
            count = min(length - start, budget)
            ctypes.memmove(local + start, remote + start, count)
            moved += count
            budget -= count
            if not budget:
                return moved
        at += length
    return moved
