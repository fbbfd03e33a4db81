"""The executor over the in-process transport: bytes, order, prefixes, and every way in which a source can fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.clock import SystemClock
from tensorhub_core.errors import StateError, TransportError
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.types import Box
from tensorhub_core.transport.base import Batch, PeerId, ReadId, Transport
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan, FaultyTransport
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tests.unit.client.reading_world import Holder, Network, Record, empty_like, model

pytestmark = pytest.mark.timeout(60)

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


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    opened: list[World] = []
    yield opened
    for world in opened:
        world.executor.close()


def test_a_version_is_read_whole_and_every_step_is_reported(worlds: list[World]) -> None:
    worlds.append(world := World())
    outcome = world.read()
    assert outcome.end is ReadEnd.VERIFIED
    assert outcome.verified.all()
    assert world.destination.holds(world.truth)
    total = world.source.memory.total_bytes
    assert outcome.done_bytes == total
    prefixes = [prefix for prefix, _, _, _ in world.record.heard]
    assert prefixes == sorted(prefixes)
    assert world.record.heard[0][:3] == (0, 0, total)
    assert world.record.heard[-1] == (len(outcome.verified), total, total, "lease")
    assert not outcome.fenced
    assert outcome.rereads == 0


def test_windows_batches_and_chunks_are_bounded(worlds: list[World]) -> None:
    worlds.append(world := World(network=MemoryNetwork(step_bytes=1000)))
    world.executor = ReadExecutor(world.counting, flow=FlowSettings(chunk_bytes=1500, most_chunk_bytes=1500, window=4))
    assert world.read().end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)
    assert world.counting.most_in_flight == 4
    assert max(int(batch.length_bytes.sum()) for batch in world.counting.batches) <= 1500
    assert sum(int(batch.length_bytes.sum()) for batch in world.counting.batches) == world.source.memory.total_bytes


def test_many_small_tensors_share_batches_and_neighbours_share_runs(worlds: list[World]) -> None:
    network = Network()
    flat = np.random.default_rng(3).integers(0, 256, 64 * 3000, np.uint8)
    into = np.zeros_like(flat)
    names = [f"{number:05}" for number in range(3000)]
    source = network.holder({name: flat[64 * at : 64 * at + 64] for at, name in enumerate(names)})
    # The destination's neighbours lie together only in the first half.
    order = [*range(1500), *range(2999, 1499, -1)]
    counting = Counting(MemoryTransport(network.network))
    destination = network.holder(
        {name: into[64 * at : 64 * at + 64] for at, name in zip(order, names, strict=True)}, transport=counting
    )
    executor = ReadExecutor(counting)
    access = source.access()
    plan = plan_read(destination.memory.layout, [access.layout])
    outcome = end_of(executor.start(plan, [access], destination.destination(), None, Record()))
    executor.close()
    assert outcome.end is ReadEnd.VERIFIED
    assert np.array_equal(into.reshape(-1, 64)[order], flat.reshape(-1, 64))
    assert max(len(batch.local) for batch in counting.batches) <= 256
    assert sum(len(batch.local) for batch in counting.batches) < 1600
    assert len(counting.batches) < 20


def test_nothing_is_read_beyond_the_allowed_prefix(worlds: list[World]) -> None:
    worlds.append(world := World())
    table = world.source.memory.table
    job = world.start(prefix=2)
    time.sleep(0.2)
    read = sum(int(batch.length_bytes.sum()) for batch in world.counting.batches)
    assert read == int(table.length_bytes[:2].sum())
    assert job.wait(0) is None, "waiting for a source that is still filling is no stall"
    job.advance("someone else's", len(table))
    job.advance("lease", 5)
    job.advance("lease", 3)
    time.sleep(0.5)
    read = sum(int(batch.length_bytes.sum()) for batch in world.counting.batches)
    assert read == int(table.length_bytes[:5].sum())
    assert world.record.heard[-1][0] == 5
    job.advance("lease", len(table))
    assert end_of(job).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)


def test_only_what_is_missing_is_read(worlds: list[World]) -> None:
    worlds.append(world := World())
    access = world.source.access()
    plan = plan_read(world.destination.memory.layout, [access.layout])
    verified = np.arange(len(plan)) % 3 == 0
    job = world.executor.start(plan, [access], world.destination.destination(), verified, world.record)
    outcome = end_of(job)
    assert outcome.verified.all()
    read = sum(int(batch.length_bytes.sum()) for batch in world.counting.batches)
    assert read == int(plan.length_bytes[~verified].sum())
    assert world.record.heard[0][0] == 1
    assert world.record.heard[0][1] == int(plan.length_bytes[verified].sum())
    assert not world.destination.holds(world.truth), "what counted as verified must not have been touched"


def test_nothing_to_read_is_verified_at_once(worlds: list[World]) -> None:
    worlds.append(world := World())
    access = world.source.access()
    plan = plan_read(world.destination.memory.layout, [access.layout])
    everything = np.ones(len(plan), np.bool_)
    outcome = end_of(world.executor.start(plan, [access], world.destination.destination(), everything, world.record))
    assert outcome.end is ReadEnd.VERIFIED
    assert world.counting.batches == []
    assert world.destination.untouched()


def test_peers_stay_attached_from_job_to_job(worlds: list[World]) -> None:
    worlds.append(world := World())
    for _ in range(3):
        assert world.read().end is ReadEnd.VERIFIED
    assert world.counting.attaches == 1


# --- another layout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_bytes", [1, 64 << 10, 64 << 20])
@pytest.mark.parametrize("step_bytes", [None, 700])
def test_segments_of_other_layouts_are_staged_and_scattered(limit_bytes: int, step_bytes: int | None) -> None:
    network = Network(MemoryNetwork(step_bytes))
    truth = model(5, {"w": (96, 130)})["w"]
    halves = [
        network.holder(
            {"w": np.ascontiguousarray(truth[:, 65 * shard : 65 * shard + 65])},
            boxes={"w": [Box("w", (0, 65 * shard), (96, 65), (0, 0))]},
            shard=shard,
            num_shards=2,
            segment_bytes=1000,
        )
        for shard in range(2)
    ]
    into = empty_like({"w": truth})
    destination = network.holder(into)
    executor = ReadExecutor(destination.transport, flow=QUICK, staging_limit_bytes=limit_bytes)
    sources = [half.access(f"lease-{shard}") for shard, half in enumerate(halves)]
    plan = plan_read(destination.memory.layout, [source.layout for source in sources])
    assert not plan.direct.all()
    for _ in range(2):
        outcome = end_of(executor.start(plan, sources, destination.destination(), None, Record()))
        assert outcome.end is ReadEnd.VERIFIED
        assert destination.holds({"w": truth})
        into["w"][:] = 0
    executor.close()


def test_a_staged_segment_that_is_wrong_is_not_scattered() -> None:
    network = Network()
    truth = model(6, {"w": (8, 64)})["w"]
    source = network.holder(
        {"w": np.ascontiguousarray(np.concatenate([truth, truth], axis=1))},
        boxes={"w": [Box("w", (0, 0), (8, 64), (0, 64))]},
        segment_bytes=512,
    )
    destination = network.holder(empty_like({"w": truth}))
    access = source.access()
    source.tensors["w"][:] = 0
    plan = plan_read(destination.memory.layout, [access.layout])
    assert not plan.direct.any()
    executor = ReadExecutor(destination.transport, flow=QUICK)
    outcome = end_of(executor.start(plan, [access], destination.destination(), None, Record()))
    executor.close()
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "corrupt")
    assert destination.untouched()


# --- failing sources --------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_read_again(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(reads={1: Fault(FaultKind.FLIP)})))
    outcome = world.read()
    assert outcome.end is ReadEnd.VERIFIED
    assert outcome.rereads == 1
    assert world.destination.holds(world.truth)


def test_a_source_whose_bytes_changed_is_corrupt(worlds: list[World]) -> None:
    worlds.append(world := World())
    access = world.source.access()
    world.source.tensors["c"].view(np.uint8)[3, 2, 1] ^= 4
    plan = plan_read(world.destination.memory.layout, [access.layout])
    outcome = end_of(world.executor.start(plan, [access], world.destination.destination(), None, world.record))
    assert (outcome.end, outcome.kind, outcome.lease) == (ReadEnd.SOURCE_FAILED, "corrupt", "lease")
    assert not outcome.verified.all()
    assert outcome.rereads == 1
    assert outcome.done_bytes == int(plan.length_bytes[outcome.verified].sum())


def test_a_transport_that_lies_is_found_out(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.LIE): 1.0})))
    outcome = world.read()
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "corrupt")
    assert not outcome.verified.any()


def test_a_source_that_moves_nothing_has_stalled(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(reads={2: Fault(FaultKind.STALL)})))
    outcome = world.read()
    assert (outcome.end, outcome.kind, outcome.lease) == (ReadEnd.SOURCE_FAILED, "stalled", "lease")
    assert outcome.fenced
    assert world.counting.fences == 1


def test_a_source_below_the_floor_has_stalled(worlds: list[World]) -> None:
    slow = FaultPlan(chances={Fault(FaultKind.SLOW, bytes_per_s=200_000): 1.0})
    worlds.append(world := World(slow))
    flow = FlowSettings(chunk_bytes=4096, window=1, stall_timeout_s=0.2, min_bytes_per_s=1e9)
    world.executor = ReadExecutor(world.counting, flow=flow)
    outcome = world.read()
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "stalled")
    assert "bytes/s" in outcome.detail


def test_a_slow_source_above_the_floor_is_read_to_the_end(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.SLOW, bytes_per_s=300_000): 1.0})))
    outcome = world.read()
    assert outcome.end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)


def test_a_failed_read_fences_and_the_next_job_reads_the_rest(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(reads={3: Fault(FaultKind.FAIL)})))
    outcome = world.read()
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "lost")
    assert outcome.fenced
    assert outcome.verified.any()
    access = world.source.access("other")
    plan = plan_read(world.destination.memory.layout, [access.layout])
    before = sum(int(batch.length_bytes.sum()) for batch in world.counting.batches)
    job = world.executor.start(plan, [access], world.destination.destination(), outcome.verified, world.record)
    assert end_of(job).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)
    assert world.counting.attaches == 2
    again = sum(int(batch.length_bytes.sum()) for batch in world.counting.batches) - before
    assert again == int(plan.length_bytes[~outcome.verified].sum())


def test_a_source_that_never_gave_a_byte_is_unreachable(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(reads={0: Fault(FaultKind.FAIL)})))
    assert world.read().kind == "unreachable"
    worlds.append(world := World(FaultPlan(unreachable=frozenset({0}))))
    outcome = world.read()
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "unreachable")
    assert not outcome.fenced
    assert world.destination.untouched()


def test_a_source_that_the_server_gave_up_is_left(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.DELAY, delay_s=0.2): 1.0})))
    job = world.start()
    job.fail("someone else's", "?")
    job.fail("lease", "its lease ended")
    outcome = end_of(job)
    assert (outcome.end, outcome.kind, outcome.detail) == (ReadEnd.SOURCE_FAILED, "lost", "its lease ended")


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_nothing_lands_after_a_cancelled_job_has_ended(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.LATE): 1.0})))
    job = world.start()
    time.sleep(0.05)
    job.cancel()
    outcome = end_of(job)
    assert outcome.end is ReadEnd.CANCELLED
    assert outcome.fenced
    world.faulty.land_late()
    assert world.destination.untouched()


def test_late_bytes_do_land_where_nobody_fences(worlds: list[World]) -> None:
    """Show that the test before this one can fail."""
    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.LATE): 1.0})))
    peer = world.faulty.attach(world.source.description)
    run = np.array([world.destination.memory.addresses[0]], np.uint64)
    read = world.faulty.post(peer, Batch(run, world.source.memory.addresses[:1], np.array([16], np.uint64)))
    assert not world.faulty.close(read)
    world.faulty.land_late()
    assert not world.destination.untouched()


def test_cancelling_a_job_that_waits_for_its_source(worlds: list[World]) -> None:
    worlds.append(world := World())
    job = world.start(prefix=0)
    time.sleep(0.05)
    job.cancel()
    outcome = end_of(job)
    assert outcome.end is ReadEnd.CANCELLED
    assert not outcome.fenced
    assert world.destination.untouched()


# --- the executor itself ----------------------------------------------------------------------------------------------


def test_one_job_at_a_time(worlds: list[World]) -> None:
    worlds.append(world := World())
    job = world.start(prefix=0)
    with pytest.raises(StateError, match="runs"):
        world.start()
    job.cancel()
    end_of(job)
    assert world.read().end is ReadEnd.VERIFIED


def test_closing_cancels_and_ends_the_threads() -> None:
    before = threading.active_count()
    world = World()
    job = world.start(prefix=0)
    world.executor.close()
    assert end_of(job).end is ReadEnd.CANCELLED
    assert threading.active_count() == before
    with pytest.raises(StateError, match="closed"):
        world.start()
    world.executor.close()


def test_a_hundred_executors_leave_nothing_behind() -> None:
    before = threading.active_count()
    world = World()
    for _ in range(100):
        executor = ReadExecutor(world.counting, flow=QUICK)
        access = world.source.access()
        plan = plan_read(world.destination.memory.layout, [access.layout])
        end_of(executor.start(plan, [access], world.destination.destination(), None, Record()))
        executor.close()
    world.executor.close()
    assert threading.active_count() == before


def test_an_observer_that_raises_ends_the_job_and_not_the_executor(worlds: list[World]) -> None:
    class Angry(Record):
        def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
            if done_bytes:
                raise ValueError("no")

    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.DELAY, delay_s=0.05): 1.0})))
    record, world.record = world.record, Angry()
    job = world.start()
    with pytest.raises(ValueError, match="no"):
        job.wait(WAIT_S)
    assert world.counting.in_flight == set()
    world.record = record
    assert world.read().end is ReadEnd.VERIFIED


def test_a_fence_that_fails_puts_the_reading_side_out_of_use(worlds: list[World]) -> None:
    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.STALL): 1.0})))

    def broken() -> None:
        raise TransportError("the agent does not go")

    world.counting.fence = broken  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="could not be fenced"):
        end_of(world.start())
    with pytest.raises(TransportError, match="out of use"):
        world.start()


def test_device_memory_needs_something_that_verifies_it() -> None:
    world = World()
    access = world.source.access()
    plan = plan_read(world.destination.memory.layout, [access.layout])
    here = world.destination.destination()
    device = type(here)(here.layout, here.table, here.addresses, here.devices, [None] * len(here.buffers))
    with pytest.raises(TransportError, match="checksum_device"):
        world.executor.start(plan, [access], device, None, world.record)
    asked: list[tuple[str, int, int]] = []

    def checksum(name: str, address: int, length_bytes: int) -> int:
        asked.append((name, address, length_bytes))
        at = np.flatnonzero((access.table.length_bytes == length_bytes) & _lies_at(plan, here, address))[0]
        return int(access.sums[at])

    executor = ReadExecutor(world.counting, flow=QUICK, checksum_device=checksum)
    assert end_of(executor.start(plan, [access], device, None, world.record)).end is ReadEnd.VERIFIED
    assert len(asked) == len(plan)
    executor.close()


def _lies_at(plan: object, here: object, address: int) -> np.ndarray:
    return here.addresses[plan.storage] + plan.offset_bytes == address  # type: ignore[attr-defined]
