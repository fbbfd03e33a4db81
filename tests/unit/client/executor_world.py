"""An executor between one source and one destination, over a transport that counts and may be faulty."""

from __future__ import annotations

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.reading import ReadOutcome
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.clock import SystemClock
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.transport.base import Batch, PeerId, ReadId, Transport
from tensorhub_core.transport.faults import FaultPlan, FaultyTransport
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tests.unit.client.reading_world import Holder, Network, Record, empty_like, model

QUICK = FlowSettings(chunk_bytes=16 << 10, window=4, stall_timeout_s=0.3, min_bytes_per_s=1.0)
SHAPES = {"a": (400, 64), "b": (3,), "c": (70, 5, 33), "empty": (0, 9), "scalar": ()}
WAIT_S = 30.0


class World:
    """One source, one destination, one executor, and a transport that may be faulty between them."""

    def __init__(self, plan: FaultPlan | None = None, network: MemoryNetwork | None = None) -> None:
        self.network = Network(network or MemoryNetwork())
        self.truth = model(1, SHAPES)
        self.source = self.network.holder({name: tensor.copy() for name, tensor in self.truth.items()})
        inner: Transport = MemoryTransport(self.network.network)
        self.faulty = FaultyTransport(inner, plan or FaultPlan(), SystemClock())
        self.counting = Counting(self.faulty)
        self.destination = self.network.holder(empty_like(self.truth), transport=self.counting)
        self.executor = ReadExecutor(self.counting, flow=QUICK)
        self.record = Record()

    def start(self, source: Holder | None = None, **options: object) -> ReadJob:
        """Begin to read from a source."""
        access = (source or self.source).access(**options)  # type: ignore[arg-type]
        plan = plan_read(self.destination.memory.layout, [access.layout])
        return self.executor.start(plan, [access], self.destination.destination(), None, self.record)

    def read(self, source: Holder | None = None) -> ReadOutcome:
        """Read from a source to the end of the job."""
        return end_of(self.start(source))


class Counting(FaultyTransport):
    """A transport that counts what is asked of it and shows what was read."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, FaultPlan(), SystemClock())
        self.attaches = 0
        self.fences = 0
        self.batches: list[Batch] = []
        self.in_flight: set[ReadId] = set()
        self.most_in_flight = 0

    def attach(self, description: bytes) -> PeerId:
        self.attaches += 1
        return super().attach(description)

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        read = super().post(peer, batch)
        self.batches.append(batch)
        self.in_flight.add(read)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return read

    def close(self, read: ReadId) -> bool:
        self.in_flight.discard(read)
        return super().close(read)

    def fence(self) -> None:
        self.fences += 1
        self.in_flight.clear()
        super().fence()


def end_of(job: ReadJob) -> ReadOutcome:
    outcome = job.wait(WAIT_S)
    assert outcome is not None, "the job did not end"
    return outcome
