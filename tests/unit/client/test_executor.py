"""The executor over the in-process transport: bytes, order, prefixes, other layouts, threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.pump import MOST_RUNS
from tensorhub_core.client.reading import ReadEnd
from tensorhub_core.errors import StateError, TransportError
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.types import Box
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tests.unit.client.executor_world import QUICK, Counting, World, end_of
from tests.unit.client.reading_world import Network, Record, empty_like, model

pytestmark = pytest.mark.timeout(60)


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


@pytest.mark.parametrize("columns", [slice(0, 256), slice(128, 256)], ids=["in place", "staged"])
@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_segment_larger_than_all_that_may_wait_for_verification_is_read(
    window: int, sources: int, columns: slice
) -> None:
    """A holder chooses the size of its segments, a reader its window: neither knows of the other."""
    network, truth = Network(), model(5, {"w": (200, 256), "x": (64, 256)})
    counting = Counting(MemoryTransport(network.network))
    holders = [network.holder({n: t.copy() for n, t in truth.items()}, segment_bytes=96 << 10) for _ in range(sources)]
    wanted = {name: np.ascontiguousarray(tensor[:, columns]) for name, tensor in truth.items()}
    boxes = {name: [Box(name, (0, columns.start), tensor.shape, (0, 0))] for name, tensor in wanted.items()}
    destination = network.holder(empty_like(wanted), boxes=boxes, transport=counting)
    executor = ReadExecutor(counting, flow=FlowSettings(chunk_bytes=4096, most_chunk_bytes=4096, window=window))
    accesses = [holder.access(str(number)) for number, holder in enumerate(holders)]
    raw = columns.start == 0
    plan = plan_read(destination.memory.layout, [each.layout for each in (accesses if raw else accesses[:1])])
    outcome = end_of(executor.start(plan, accesses if raw else accesses[:1], destination.destination(), None, Record()))
    executor.close()
    assert outcome.end is ReadEnd.VERIFIED
    assert destination.holds(wanted)


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
    assert max(len(batch.local) for batch in counting.batches) <= MOST_RUNS
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
        job.wait(30)
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


def test_device_memory_needs_something_that_works_on_it(worlds: list[World]) -> None:
    worlds.append(world := World())
    access = world.source.access()
    plan = plan_read(world.destination.memory.layout, [access.layout])
    here = world.destination.destination()
    device = type(here)(here.layout, here.table, here.addresses, here.devices, [None] * len(here.buffers))
    with pytest.raises(TransportError, match="works on it"):
        world.executor.start(plan, [access], device, None, world.record)
    assert world.destination.untouched()
