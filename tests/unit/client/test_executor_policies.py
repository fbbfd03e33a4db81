"""What is compared with its checksum under each policy, and what becomes of the rest when something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.verifier import SAMPLED_SHARE, choose_checks
from tensorhub_core.config import ClientConfig
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.types import Box
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan
from tests.unit.client.executor_world import QUICK, World, end_of
from tests.unit.client.reading_world import Network, Record, empty_like, model

pytestmark = pytest.mark.timeout(60)
Open = Callable[..., World]


@pytest.fixture
def opened() -> Iterator[Open]:
    worlds: list[World] = []

    def open_world(policy: str, plan: FaultPlan | None = None, seed: int = 0) -> World:
        world = World(plan)
        chance = np.random.default_rng(seed)
        world.executor = ReadExecutor(world.counting, ClientConfig(verify=policy), flow=QUICK, chance=chance)
        worlds.append(world)
        return world

    yield open_world
    for world in worlds:
        world.executor.close()


@pytest.mark.parametrize("policy", ["always", "sampled", "off"])
def test_every_policy_reads_all_bytes(opened: Open, policy: str) -> None:
    world = opened(policy)
    outcome = world.read()
    assert outcome.end is ReadEnd.VERIFIED
    assert outcome.verified.all()
    assert outcome.done_bytes == world.source.memory.total_bytes
    assert world.destination.holds(world.truth)


def test_off_takes_what_comes(opened: Open) -> None:
    world = opened("off", FaultPlan(chances={Fault(FaultKind.FLIP): 1.0}))
    assert world.read().end is ReadEnd.VERIFIED
    assert not world.destination.holds(world.truth)


@pytest.mark.parametrize("seed", range(8))
def test_a_wrong_sample_takes_back_all_that_was_not_compared(opened: Open, seed: int) -> None:
    world = opened("sampled", seed=seed)
    access = world.source.access()
    for tensor in world.source.tensors.values():
        tensor.reshape(-1).view(np.uint8)[:] ^= 1
    plan = plan_read(world.destination.memory.layout, [access.layout])
    outcome: ReadOutcome = end_of(
        world.executor.start(plan, [access], world.destination.destination(), None, world.record)
    )
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "corrupt")
    assert not outcome.verified.any(), "whose compared segments are wrong is believed nothing"
    assert outcome.done_bytes == 0
    fresh = world.network.holder({name: tensor.copy() for name, tensor in world.truth.items()})
    assert world.read(fresh).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)


def test_what_was_compared_and_right_stays_after_a_wrong_sample(opened: Open) -> None:
    kept = set()
    for seed in range(12):
        world = opened("sampled", seed=seed)
        access = world.source.access()
        world.source.tensors["scalar"].reshape(-1).view(np.uint8)[0] ^= 1
        plan = plan_read(world.destination.memory.layout, [access.layout])
        job = world.executor.start(plan, [access], world.destination.destination(), None, world.record)
        outcome = end_of(job)
        chosen = job.checker.chosen
        assert chosen is not None
        if outcome.end is ReadEnd.VERIFIED:
            assert outcome.verified.all()
            continue
        assert not (outcome.verified & ~chosen).any()
        assert outcome.done_bytes == int(plan.length_bytes[outcome.verified].sum())
        kept.add(int(outcome.verified.sum()))
    assert max(kept, default=0) > 0


@pytest.mark.parametrize(("policy", "scattered"), [("always", False), ("off", True)])
def test_staged_segments_follow_the_policy_too(policy: str, scattered: bool) -> None:
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
    executor = ReadExecutor(destination.transport, ClientConfig(verify=policy), flow=QUICK)
    outcome = end_of(executor.start(plan, [access], destination.destination(), None, Record()))
    executor.close()
    assert (outcome.end is ReadEnd.VERIFIED) == scattered
    assert destination.untouched() != scattered


def test_samples_are_drawn_for_every_job_and_never_none() -> None:
    chance = np.random.default_rng(1)
    assert choose_checks("always", 10, chance) is None
    off = choose_checks("off", 10, chance)
    assert off is not None
    assert not off.any()
    first, second = choose_checks("sampled", 10_000, chance), choose_checks("sampled", 10_000, chance)
    assert first is not None
    assert second is not None
    assert (first != second).any()
    assert abs(first.mean() - SAMPLED_SHARE) < 0.02
    for _ in range(50):
        few = choose_checks("sampled", 3, chance)
        assert few is not None
        assert few.any()
    assert choose_checks("sampled", 0, chance) is not None
