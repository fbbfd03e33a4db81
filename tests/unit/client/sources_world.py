"""One destination and several sources with rates of their own, under a clock that moves whenever it is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.reading import SourceAccess
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Transport
from tensorhub_core.transport.faults import FaultPlan, FaultyTransport
from tensorhub_core.transport.memory import MemoryTransport
from tests.unit.client.reading_world import Network, Record, empty_like, model

FLOW = FlowSettings(chunk_bytes=16 << 10, most_chunk_bytes=16 << 10, window=4, stall_timeout_s=20.0, min_bytes_per_s=1)
TICK_S = 500e-6
NEVER = 1e-9
"""A rate at which nothing arrives."""


class Clock:
    """Time that passes only by being asked for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += TICK_S
        return self.seconds


class Metered(FaultyTransport):
    """Deliver what is read from each peer in order, at the peer's own rate; `rates` go with the peers as attached."""

    def __init__(self, inner: Transport, clock: Clock, rates: dict[bytes, float]) -> None:
        super().__init__(inner, FaultPlan(), clock)
        self.clock, self.rates = clock, rates
        self.bytes_from: Counter[bytes] = Counter()
        self.fences = 0
        self.peers: dict[PeerId, bytes] = {}
        self.free_s: dict[bytes, float] = {}
        self.due_s: dict[ReadId, float] = {}

    def attach(self, description: bytes) -> PeerId:
        peer = super().attach(description)
        self.peers[peer] = description
        return peer

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        read, source, size = super().post(peer, batch), self.peers[peer], int(batch.length_bytes.sum())
        begin = max(self.clock.seconds, self.free_s.get(source, 0.0))
        self.free_s[source] = self.due_s[read] = begin + size / self.rates[source]
        self.bytes_from[source] += size
        return read

    def poll(self, read: ReadId) -> Progress:
        return super().poll(read) if self.clock.seconds >= self.due_s[read] else Progress(ReadState.ACTIVE)

    def fence(self) -> None:
        self.fences += 1
        self.free_s.clear()
        super().fence()


class Sources:
    """Sources `0 .. len(rates) - 1` of the same bytes, each with a rate in bytes per second."""

    def __init__(self, rates: Sequence[float], segments: int = 1000, flow: FlowSettings = FLOW) -> None:
        self.network, self.clock = Network(), Clock()
        self.truth = model(1, {"w": (segments, 1024)})
        self.holders = [self.network.holder({"w": self.truth["w"].copy()}) for _ in rates]
        self.rates = {holder.description: rate for holder, rate in zip(self.holders, rates, strict=True)}
        self.transport = Metered(MemoryTransport(self.network.network), self.clock, self.rates)
        self.destination = self.network.holder(empty_like(self.truth), transport=self.transport)
        self.executor = ReadExecutor(self.transport, flow=flow, clock=self.clock)
        self.record = Record()
        self.sums = self.holders[0].memory.sums()
        self.total_bytes = self.destination.memory.total_bytes

    def access(self, number: int, prefix: int | None = None) -> SourceAccess:
        """Return a source under the lease of its number, with the checksums of the truth."""
        return replace(self.holders[number].access(str(number), prefix), sums=self.sums)

    def start(self, *sources: SourceAccess, verified: np.ndarray | None = None) -> ReadJob:
        """Read from these sources, from all by default."""
        accesses = sources or tuple(self.access(number) for number in range(len(self.holders)))
        plan = plan_read(self.destination.memory.layout, [each.layout for each in accesses])
        return self.executor.start(plan, accesses, self.destination.destination(), verified, self.record)

    def flip(self, number: int, segment: int) -> None:
        """Change a byte of a segment at one source."""
        self.holders[number].tensors["w"].view(np.uint8)[segment, 7] ^= 1

    def taken(self, number: int) -> int:
        """Return how many bytes were asked of a source."""
        return self.transport.bytes_from[self.holders[number].description]
