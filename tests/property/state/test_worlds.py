"""Random worlds around the real server machine: nothing that a group commits or a lease allows is ever wrong."""

from __future__ import annotations

import pytest

from tests.sim.world import World


@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 1, 2), (2, 2, 1), (2, 3, 2)], ids=str)
def test_random_worlds_keep_the_laws(shape: tuple[int, int, int]) -> None:
    readers, shards, trainers = shape
    commits = 0
    for seed in range(60):
        world = World(seed, readers, shards, trainers, checksums=seed % 2 == 0)
        for _ in range(1_000):
            world.advance()
        commits += world.commits
    assert commits > 60, "the worlds were too quiet to mean anything"
