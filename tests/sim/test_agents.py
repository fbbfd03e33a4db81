"""Simulated worlds with seed agents: zones wait for them while they come on, and for nobody else."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from tests.sim.run import World
from tests.sim.scenario import draw_agents

WORLDS = 10


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_promise_holds_where_agents_bring_versions_into_zones() -> None:
    happened: Counter[str] = Counter()
    for seed in range(WORLDS):
        world = World(draw_agents(seed))
        result = world.run()
        if result.error is not None:
            raise AssertionError(f"replay: python -m tests.sim --agents --seed {seed} --trace") from result.error
        watch = world.cluster.judge.zones
        happened.update(brought=watch.brought, held_back=watch.held, late=watch.lates, taken=result.calls["take"])
        gc.collect()
    assert happened["taken"] >= happened["brought"] > 10 * WORLDS, f"the worlds were too quiet: {happened}"
    assert happened["held_back"] > 5 * WORLDS, f"hardly anybody ever waited for an agent: {happened}"
    assert happened["late"] > 2, f"hardly any agent was ever late: {happened}"
