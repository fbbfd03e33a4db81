"""The data plane: `MemoryTransport` over a network in which reads take virtual time, and go wrong as ordered.

Bytes are copied piece by piece, each piece as it is in the source's memory at that moment, so that a read of memory
which changes is torn. A read that was closed early goes on until its reader fences.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensorhub_core.transport.base import Batch, Progress, ReadId, ReadState, Region
from tensorhub_core.transport.memory import MemoryTransport, covered
from tests.sim.fibers import Process, Timeline
from tests.sim.network import Weather
from tests.sim.shims import Waiters

_SHORTEST_WAIT_S = 4e-3
KINDS = ("fail", "stall", "flip", "lie", "slow")
Landed = Callable[["SimTransport", Process, int, int], None]
"""Called with the reader's transport, the source's process, the address and the length of what is to be written."""


@dataclass(eq=False)
class Flight:
    """A read on its way."""

    reader: SimTransport
    agent: str
    batch: Batch
    pieces: list[tuple[int, int, int]]
    """(address to write, address to read, bytes) that have yet to land."""
    fault: str = ""
    cancelled: bool = False
    progress: Progress = field(default_factory=lambda: Progress(ReadState.ACTIVE))


@dataclass
class _Agent:
    process: Process
    regions: tuple[Region, ...]


class DataPlane:
    """Everything that transports of one world share; takes the place of `MemoryNetwork`."""

    def __init__(self, timeline: Timeline, chance: random.Random, weather: Weather, landed: Landed) -> None:
        self.timeline, self._chance, self._weather, self._landed = timeline, chance, weather, landed
        self.rates: dict[str, float] = {}
        """How often a read from a process goes wrong."""
        self.kinds: tuple[str, ...] = KINDS
        self.one_sided = True
        """A source that is stopped can still be read, as with RDMA."""
        self.flights: list[Flight] = []
        self.faults = 0
        self._agents: dict[str, _Agent] = {}
        self._names = self._posted = 0
        self._process: Process | None = None

    def of(self, process: Process) -> SimTransport:
        """Return a transport for a process."""
        return SimTransport(self, process)

    # What `MemoryTransport` asks of its network.

    def step(self) -> None:
        """Do nothing: bytes move with time."""

    def new_name(self) -> str:
        self._names += 1
        return f"agent-{self._names}"

    def serve_for(self, process: Process, agent: str, regions: tuple[Region, ...]) -> None:
        self._agents.setdefault(agent, _Agent(process, ())).regions = regions

    def remove(self, agent: str) -> None:
        self._agents.pop(agent, None)

    def serves(self, agent: str, batch: Batch | None = None) -> bool:
        found = self._agents.get(agent)
        if found is None or not found.process.alive or batch is None:
            return found is not None and found.process.alive
        return covered(found.regions, batch.remote, batch.length_bytes, batch.remote_device)

    def launch(self, reader: SimTransport, agent: str, batch: Batch) -> tuple[int, Flight]:
        self._posted += 1
        runs = list(zip(batch.local.tolist(), batch.remote.tolist(), batch.length_bytes.tolist(), strict=True))
        flight = Flight(reader, agent, batch, [piece for run in runs for piece in self._pieces(run)])
        chance, source = self._chance, self._agents[agent].process
        if chance.random() < self.rates.get(source.name, 0.0):
            flight.fault = chance.choice(self.kinds)
            self.faults += 1
        self.flights.append(flight)
        self._later(flight, first=True)
        return self._posted, flight

    def cancel(self, reader: SimTransport) -> None:
        for flight in self.flights:
            flight.cancelled = flight.cancelled or flight.reader is reader
        self.flights = [flight for flight in self.flights if not flight.cancelled]

    # How bytes move.

    def _pieces(self, run: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        local, remote, length = run
        half = self._chance.randint(0, length)
        return [(local + at, remote + at, size) for at, size in ((0, half), (half, length - half)) if size]

    def _later(self, flight: Flight, first: bool = False) -> None:
        chance = self._chance
        delay_s = 1e-3 + chance.random() * 6e-3
        if first and flight.fault == "stall":
            delay_s += 2 + 20 * chance.random()
        elif flight.fault == "slow":
            delay_s += 0.3 * chance.random()
        elif first and flight.fault == "lie":
            flight.progress, flight.pieces = Progress(ReadState.DONE), []
        self.timeline.after(delay_s, lambda: self._move(flight))

    def _move(self, flight: Flight) -> None:
        now, reader = self.timeline.now, flight.reader.process
        source = self._agents.get(flight.agent)
        if flight.cancelled or not reader.alive or flight.progress.state is not ReadState.ACTIVE:
            return self._end(flight)
        if source is None or not source.process.alive or flight.fault == "fail":
            flight.progress = Progress(ReadState.FAILED, "the peer is gone")
            return self._end(flight)
        if not covered(source.regions, flight.batch.remote, flight.batch.length_bytes, "cpu"):
            flight.progress = Progress(ReadState.FAILED, "the peer no longer serves this memory")
            return self._end(flight)
        held = max(self._weather.blocked(reader.name, now), self._weather.blocked(source.process.name, now))
        if not self.one_sided:
            held = max(held, source.process.paused_until)
        if held > now:
            return self.timeline.at(held, lambda: self._move(flight))
        self._land(flight, source.process)
        if flight.pieces:
            return self._later(flight)
        flight.progress = Progress(ReadState.DONE)
        self._end(flight)

    def _land(self, flight: Flight, source: Process) -> None:
        for _ in range(self._chance.randint(1, max(1, len(flight.pieces) // 2))):
            local, remote, length = flight.pieces.pop(0)
            self._landed(flight.reader, source, local, length)
            ctypes.memmove(local, remote, length)
            if flight.fault == "flip":
                byte = (ctypes.c_uint8 * length).from_address(local)
                byte[self._chance.randrange(length)] ^= 1 << self._chance.randrange(8)
                flight.fault = "flipped"

    def _end(self, flight: Flight) -> None:
        if flight in self.flights:
            self.flights.remove(flight)


class _Side:
    """The network as one process's transport sees it."""

    def __init__(self, plane: DataPlane, process: Process) -> None:
        self._plane, self._process = plane, process

    def serve(self, agent: str, regions: tuple[Region, ...]) -> None:
        self._plane.serve_for(self._process, agent, regions)

    def remove(self, agent: str) -> None:
        if self._process.alive:
            self._plane.remove(agent)

    def __getattr__(self, name: str) -> object:
        return getattr(self._plane, name)


class SimTransport(MemoryTransport):
    """The memory transport of one simulated process."""

    def __init__(self, plane: DataPlane, process: Process) -> None:
        super().__init__(_Side(plane, process))  # type: ignore[arg-type]
        self.process = process
        self._waiters = Waiters(plane.timeline)

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Let some virtual time pass."""
        self._waiters.wait(max(timeout_s, _SHORTEST_WAIT_S))

    @property
    def writable(self) -> list[Region]:
        """Return the memory that reads may write to now."""
        return [*self._regions, *self._local]
