"""Each promise of the server and of the client, switched off, has to be noticed within a few worlds.

Not here: what only makes worlds slower, or what other laws make up for. Without the grace after a restart, checksums
and the question at the end of a read still keep wrong bytes out; the walk's drill has that one.
"""

from __future__ import annotations

import gc

import pytest

from tests.sim.mutants import AGENTS, MUTANTS, cuts_are_not_compared
from tests.sim.run import simulate
from tests.sim.scenario import draw, draw_agents, draw_columns, draw_harsh

WORLDS = 40
FIRST = {"agents_try_only_once": 6, "nobody_waits_for_a_seed": 8}
"""Seeds where it shows; the worlds before take seconds and are none for these."""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_promise_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    makers = (draw_columns,) if name == cuts_are_not_compared.__name__ else (draw, draw_harsh)
    makers = (draw_agents,) if MUTANTS[name] in AGENTS else makers
    for seed in range(FIRST.get(name, 0), WORLDS):
        for make in makers:
            if simulate(make(seed)).error is not None:
                return
        gc.collect()
    pytest.fail(f"{name} was not noticed in {2 * WORLDS} worlds")
