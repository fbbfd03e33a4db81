"""Random worlds around the real server machine: nothing that a group commits or a lease allows is ever wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.hasty import HastyWorld
from tests.sim.world import World
from tests.sim.zones import ZonedWorld

SHAPES = [(2, 1, 1), (3, 1, 2), (2, 2, 1), (2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_worlds_keep_the_laws(shape: tuple[int, int, int]) -> None:
    readers, shards, trainers = shape
    commits = most_sources = given = 0
    for seed in range(60):
        world = World(seed, readers, shards, trainers, checksums=seed % 2 == 0)
        for _ in range(1_000):
            world.advance()
        commits += world.commits
        most_sources = max(most_sources, world.most_sources)
        given += world.keeper.parts.given
    assert commits > 60, "the worlds were too quiet to mean anything"
    assert most_sources > 1 or shards > 2, "nobody read from several sources"
    assert given > 60, "hardly anybody was told what parts sum to"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_worlds_that_stage_and_install_keep_the_laws(shape: tuple[int, int, int]) -> None:
    readers, shards, trainers = shape
    commits: Counter[str] = Counter()
    for seed in range(60):
        kind = HastyWorld if seed % 3 == 0 else World
        world = kind(seed, readers, shards, trainers, checksums=seed % 2 == 0, stages=True)
        for _ in range(2_000):
            world.advance()
        commits += world.commits_by_mode
    assert min(commits["stage"], commits["install"]) > 40, f"the worlds were too quiet to mean anything: {commits}"


@pytest.mark.parametrize("retain", [1, 2])
def test_random_worlds_lose_no_retained_version(retain: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(120):
        readers, shards, trainers = SHAPES[seed % len(SHAPES)]
        world = World(seed, readers, shards, trainers, retain=retain, stages=seed % 3 == 0)
        for _ in range(1_500):
            world.advance()
        for name in ("kept", "freed", "refused", "handed_over"):
            happened[name] += getattr(world.keeper, name)
        happened["released"] += len(world.opinion.released)
    assert min(happened[n] for n in ("kept", "freed", "released", "handed_over")) > 40, f"too quiet: {happened}"
    assert happened["refused"] > 4, f"nobody ever lacked memory: {happened}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_worlds_in_which_readers_reshard_and_follow_each_other_keep_the_laws(
    shape: tuple[int, int, int],
) -> None:
    readers, shards, trainers = shape
    commits = followed = 0
    for seed in range(40):
        world = World(seed, readers + 1, shards, trainers, stages=seed % 4 == 0, reshards=True)
        for _ in range(1_000):
            world.advance()
        commits += world.commits
        followed += world.resharding.followed
    assert commits > 40, "the worlds were too quiet to mean anything"
    assert followed > 40, "hardly anybody followed who still reshards"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_worlds_with_seed_agents_keep_the_laws(shape: tuple[int, int, int]) -> None:
    readers, shards, trainers = shape
    commits = held = seen = late = 0
    for seed in range(30):
        world = ZonedWorld(seed, readers + 1, shards, trainers, agents=1 + seed % 2, stages=seed % 3 == 0)
        for _ in range(1_000):
            world.advance()
            late += any(lead.late for model in world.state.models.values() for lead in model.leads.values())
        commits += world.commits
        held, seen = held + world.held, seen + world.seen
    happened = {"commits": commits, "held back": held, "seen": seen, "late": late}
    assert min(happened.values()) > 5, f"too quiet: {happened}"
