"""Every way in which a source can fail, and what is left of it when the job has ended."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.reading import ReadEnd
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.transport.base import Batch
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan
from tests.unit.client.executor_world import World, end_of

pytestmark = pytest.mark.timeout(60)


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
    worlds.append(world := World(FaultPlan(chances={Fault(FaultKind.STALL): 1.0})))
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
