"""Hundreds of simulated worlds, each from one seed: `python -m tests.sim --seed N --trace` replays one."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from tests.sim.run import simulate
from tests.sim.scenario import KINDS, draw, draw_columns, draw_harsh

BLOCK = 30
WORLDS = 300
HARSH = 25
COLUMNS = 20


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("first", range(0, WORLDS, BLOCK))
def test_every_promise_holds_in_every_world(first: int) -> None:
    calls: Counter[str] = Counter()
    for seed in range(first, first + BLOCK):
        result = simulate(draw(seed))
        if result.error is not None:
            raise AssertionError(f"replay: python -m tests.sim --seed {seed} --trace") from result.error
        calls.update(result.calls)
        if seed % 8 == 0:
            gc.collect()
    assert calls["update"] > 20 * BLOCK, "hardly anything happened"
    assert calls["install"] > 3 * BLOCK
    assert calls["publish"] > 10 * BLOCK


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_promise_holds_in_harsh_worlds() -> None:
    for seed in range(HARSH):
        result = simulate(draw_harsh(seed))
        if result.error is not None:
            raise AssertionError(f"harsh world {seed}: {result.scenario}") from result.error


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_promise_holds_where_parts_of_segments_are_read() -> None:
    for seed in range(COLUMNS):
        result = simulate(draw_columns(seed))
        if result.error is not None:
            raise AssertionError(f"world by columns {seed}: {result.scenario}") from result.error


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = Counter(fault.kind for seed in range(WORLDS) for fault in draw(seed).faults)
    assert drawn.keys() == set(KINDS)
    assert min(drawn.values()) > WORLDS / 20
