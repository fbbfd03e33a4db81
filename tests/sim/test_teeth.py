"""Each promise of the server and of the client, switched off, has to be noticed within a few worlds.

Not here: what only makes worlds slower, or what other laws make up for. Without the grace after a restart, checksums
and the question at the end of a read still keep wrong bytes out; the walk's drill has that one.
"""

from __future__ import annotations

import gc

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate
from tests.sim.scenario import draw, draw_harsh

WORLDS = 40


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_promise_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    for seed in range(WORLDS):
        for make in (draw, draw_harsh):
            if simulate(make(seed)).error is not None:
                return
        gc.collect()
    pytest.fail(f"{name} was not noticed in {2 * WORLDS} worlds")
