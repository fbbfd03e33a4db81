"""The executor with several sources of one layout: shares, stragglers, corrupt and lost sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tensorhub_core.client.reading import ReadEnd
from tests.unit.client.executor_world import end_of
from tests.unit.client.sources_world import FLOW, NEVER, Sources

pytestmark = pytest.mark.timeout(60)
FAST, SLOW = 1e6, 5e4
IN_FLIGHT = FLOW.chunk_bytes * FLOW.window


@pytest.fixture
def open_world() -> Iterator[Callable[..., Sources]]:
    worlds: list[Sources] = []

    def make(*rates: float, **more: Any) -> Sources:
        worlds.append(Sources(rates, **more))
        return worlds[-1]

    yield make
    for world in worlds:
        world.executor.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def done_bytes(world: Sources) -> int:
    return world.record.heard[-1][1] if world.record.heard else 0


@pytest.mark.parametrize("rates", [(FAST, FAST), (FAST, FAST, FAST), (FAST, FAST / 3)])
def test_sources_share_the_work_by_what_they_give(open_world: Callable[..., Sources], rates: tuple[float, ...]) -> None:
    world = open_world(*rates)
    outcome = end_of(world.start())
    assert outcome.end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)
    assert sum(world.taken(number) for number in range(len(rates))) == world.total_bytes
    for number, rate in enumerate(rates):
        assert world.taken(number) == pytest.approx(world.total_bytes * rate / sum(rates), rel=0.1)
    assert world.clock.seconds < 1.1 * world.total_bytes / sum(rates)
    assert {lease for *_, lease in world.record.heard if lease} <= set(map(str, range(len(rates))))


def test_the_verified_prefix_keeps_moving(open_world: Callable[..., Sources]) -> None:
    world = open_world(FAST, FAST / 2)
    assert end_of(world.start()).end is ReadEnd.VERIFIED
    ends = np.concatenate(([0], np.cumsum(world.destination.memory.table.length_bytes)))
    for prefix, done_bytes, _, _ in world.record.heard:
        assert done_bytes - int(ends[prefix]) <= 2 * IN_FLIGHT, "what is done lies close behind what is verified"


def test_a_straggler_is_left_without_an_error(open_world: Callable[..., Sources]) -> None:
    world = open_world(FAST, SLOW)
    outcome = end_of(world.start())
    assert (outcome.end, outcome.fenced) == (ReadEnd.VERIFIED, False)
    assert world.destination.holds(world.truth)
    assert world.taken(1) <= 2 * SLOW + IN_FLIGHT, "it is asked for nothing more after about a second"
    assert world.clock.seconds < 1.1 * world.total_bytes / FAST


@pytest.mark.parametrize("at", [0, 20])
def test_a_source_that_stops_does_not_hold_up_the_end(open_world: Callable[..., Sources], at: int) -> None:
    world = open_world(FAST, FAST)
    job = world.start()
    wait_for(lambda: world.taken(1) >= at * FLOW.chunk_bytes)
    description = world.holders[1].description
    world.rates[description] = NEVER
    world.network.network.stop(description)
    outcome = end_of(job)
    assert outcome.end is ReadEnd.SOURCE_FAILED
    assert (outcome.lease, outcome.kind) in (("1", "slow"), ("1", "unreachable"))
    assert outcome.fenced
    left = int((~outcome.verified).sum()) * 4096
    assert left <= IN_FLIGHT
    rest = world.start(world.access(0), verified=outcome.verified)
    assert end_of(rest).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)
    assert world.taken(0) + world.taken(1) <= world.total_bytes + IN_FLIGHT
    assert world.clock.seconds < 1.2 * world.total_bytes / FAST + 2


def test_a_source_alone_is_no_straggler(open_world: Callable[..., Sources]) -> None:
    world = open_world(SLOW, segments=50)
    assert end_of(world.start()).end is ReadEnd.VERIFIED


@pytest.mark.parametrize("count", [1, 2])
def test_a_progress_callback_that_takes_its_time_is_not_the_sources_fault(
    open_world: Callable[..., Sources], count: int
) -> None:
    """Over a transport by which bytes come in only while it is polled."""
    world = open_world(*[FAST] * count, segments=200)
    hear, transport = world.record.on_progress, world.transport

    def slowly(*figures: Any) -> None:
        hear(*figures)
        world.clock.seconds += 3 * FLOW.stall_timeout_s
        for times in (transport.due_s, transport.free_s):
            times.update({each: due + 3 * FLOW.stall_timeout_s for each, due in times.items()})  # type: ignore[attr-defined]

    world.record.on_progress = slowly  # type: ignore[method-assign]
    outcome = end_of(world.start())
    assert (outcome.end, outcome.detail) == (ReadEnd.VERIFIED, "")
    assert world.destination.holds(world.truth)


def test_a_read_that_a_straggler_began_is_taken_over(open_world: Callable[..., Sources]) -> None:
    """Segments are larger than what is asked for at once: a straggler is left in the middle of one."""
    world = open_world(FAST, SLOW, flow=type(FLOW)(chunk_bytes=1024, most_chunk_bytes=1024, window=2))
    outcome = end_of(world.start())
    assert outcome.end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)


def test_a_wrong_segment_is_read_from_another_source_and_the_first_named(open_world: Callable[..., Sources]) -> None:
    world = open_world(FAST, FAST, segments=100)
    world.flip(0, 40)
    job = world.start(world.access(0), world.access(1, prefix=0))
    wait_for(lambda: done_bytes(world) == world.total_bytes - 4096)
    assert job.wait(0.05) is None, "the other source may not be read yet"
    job.advance("1", 100)
    outcome = end_of(job)
    assert (outcome.end, outcome.rereads, outcome.corrupt) == (ReadEnd.VERIFIED, 1, ("0",))
    assert world.destination.holds(world.truth)
    assert (world.taken(0), world.taken(1)) == (world.total_bytes, 4096)


def test_a_source_that_is_often_wrong_is_left(open_world: Callable[..., Sources]) -> None:
    world = open_world(FAST, FAST)
    for segment in range(1000):
        world.flip(1, segment)
    outcome = end_of(world.start())
    assert (outcome.end, outcome.lease, outcome.kind) == (ReadEnd.SOURCE_FAILED, "1", "corrupt")
    rest = end_of(world.start(world.access(0), verified=outcome.verified))
    assert rest.end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)


def test_a_segment_that_is_wrong_everywhere_ends_the_job(open_world: Callable[..., Sources]) -> None:
    world = open_world(FAST, FAST, FAST, segments=100)
    for number in range(3):
        world.flip(number, 60)
    outcome = end_of(world.start())
    assert (outcome.end, outcome.kind, outcome.rereads) == (ReadEnd.SOURCE_FAILED, "corrupt", 2)
    assert outcome.corrupt == ()
    assert not outcome.verified[60]


def test_after_a_source_is_lost_only_what_is_missing_is_read(open_world: Callable[..., Sources]) -> None:
    world = open_world(FAST, FAST)
    job = world.start()
    wait_for(lambda: done_bytes(world) > world.total_bytes // 2)
    world.network.network.kill(world.holders[0].description)
    outcome = end_of(job)
    assert (outcome.end, outcome.lease, outcome.kind) == (ReadEnd.SOURCE_FAILED, "0", "lost")
    assert outcome.verified.sum() > 500
    rest = world.start(world.access(1), verified=outcome.verified)
    assert end_of(rest).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)
    assert world.taken(0) + world.taken(1) < 1.1 * world.total_bytes


def test_a_source_that_fills_is_read_as_far_as_it_got(open_world: Callable[..., Sources]) -> None:
    world = open_world(FAST, FAST)
    job = world.start(world.access(0), world.access(1, prefix=300))
    outcome = end_of(job)
    assert outcome.end is ReadEnd.VERIFIED
    assert 0 < world.taken(1) <= 300 * 4096
    assert world.destination.holds(world.truth)
