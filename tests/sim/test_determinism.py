"""A world hangs on its seed alone: the same messages and calls at the same virtual times, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.run import simulate
from tests.sim.scenario import draw

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 4


def hashes(hash_seed: int) -> list[str]:
    """Return the hashes of some worlds' traces, as another process computes them."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.sim", "--first", "3", "--seeds", str(SEEDS), "--hash"],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    return run.stdout.splitlines()[:SEEDS]


@pytest.mark.slow
def test_a_seed_is_the_same_world_in_every_process() -> None:
    first = hashes(0)
    assert len(set(first)) == SEEDS
    assert hashes(1) == first
    assert hashes(12345) == first


def test_a_seed_is_the_same_world_twice_in_one_process_traced_or_not() -> None:
    runs = [simulate(draw(5), traced) for traced in (True, False, True)]
    assert runs[0].trace_hash == runs[2].trace_hash
    assert runs[0].lines == runs[2].lines
    assert len(runs[0].lines) > 500
    assert [(run.steps, run.calls, run.virtual_s) for run in runs] == [
        (runs[0].steps, runs[0].calls, runs[0].virtual_s)
    ] * 3


def test_other_seeds_are_other_worlds() -> None:
    assert simulate(draw(5), True).trace_hash != simulate(draw(6), True).trace_hash
