"""Fault schedules as hypothesis draws and shrinks them: what remains of a failure is the shortest story of it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.sim.run import simulate
from tests.sim.scenario import CALM_S, KINDS, Fault, Scenario

FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(KINDS),
    at_s=st.floats(2.0, CALM_S - 1.0).map(lambda s: round(s, 2)),
    for_s=st.floats(0.05, 12.0).map(lambda s: round(s, 2)),
    target=st.integers(0, 7),
    strength=st.floats(0.0, 1.0).map(lambda s: round(s, 2)),
)
SCENARIOS = st.builds(
    Scenario,
    seed=st.integers(0, 1 << 32),
    readers=st.lists(st.sampled_from((2, 1)), min_size=1, max_size=2).map(tuple),
    faults=st.lists(FAULTS, max_size=6).map(lambda faults: tuple(sorted(faults, key=lambda fault: fault.at_s))),
    one_sided=st.booleans(),
    retain=st.integers(0, 2),
    queues=st.booleans(),
    hub_kill_at_rest=st.booleans(),
    joins_at_rest=st.booleans(),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SCENARIOS)
def test_every_promise_holds_under_any_schedule(scenario: Scenario) -> None:
    result = simulate(scenario)
    if result.error is not None:
        note("\n".join(simulate(scenario, True).lines[-200:]))
        raise result.error
