"""Each promise of the server and of the client, switched off, has to be noticed within a few worlds."""

from __future__ import annotations

import gc

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate
from tests.sim.scenario import draw

WORLDS = 60


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_promise_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    for seed in range(WORLDS):
        if simulate(draw(seed)).error is not None:
            return
        gc.collect()
    pytest.fail(f"{name} was not noticed in {WORLDS} worlds")
