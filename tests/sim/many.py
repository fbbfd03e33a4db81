"""Run many worlds and count what came of them; in several processes if wanted."""

from __future__ import annotations

import collections
import functools
import gc
import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.sim.run import Result, simulate
from tests.sim.scenario import draw, draw_agents

BLOCK = 5


@dataclass(frozen=True)
class Show:
    """What is to be told of each world."""

    trace: bool = False
    hashes: bool = False
    agents: bool = False
    """The worlds are those with seed agents."""


@dataclass
class Total:
    """What came of some worlds."""

    worlds: int = 0
    failed: int = 0
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    lines: list[str] = field(default_factory=list)

    def add(self, other: Total) -> None:
        """Count other worlds too."""
        self.worlds, self.failed = self.worlds + other.worlds, self.failed + other.failed
        self.calls.update(other.calls)
        self.refused.update(other.refused)

    def __str__(self) -> str:
        return f"{self.worlds} worlds, {self.failed} failed; calls {dict(self.calls)}; refused {dict(self.refused)}"


def run_all(seeds: Sequence[int], show: Show, jobs: int = 1) -> Iterator[Total]:
    """Yield what comes of one block of seeds after the other."""
    blocks = [seeds[at : at + BLOCK] for at in range(0, len(seeds), BLOCK)]
    run = functools.partial(run_block, show=show)
    if jobs == 1:
        yield from map(run, blocks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=64) as pool:
        yield from pool.imap(run, blocks)


def run_block(seeds: Sequence[int], show: Show) -> Total:
    """Run some worlds."""
    total = Total()
    for seed in seeds:
        scenario = draw_agents(seed) if show.agents else draw(seed)
        result = simulate(scenario, show.trace or show.hashes)
        total.worlds += 1
        total.calls.update(result.calls)
        total.refused.update(result.failures)
        total.lines += result.lines if show.trace else []
        total.lines += [f"{seed} {result.trace_hash}"] if show.hashes else []
        if result.error is not None:
            total.failed += 1
            total.lines += story(result, show.trace)
    gc.collect()
    return total


def story(result: Result, traced: bool) -> list[str]:
    """Tell what went wrong, and how to see it again."""
    error, seed = result.error, result.scenario.seed
    assert error is not None
    where = traceback.extract_tb(error.__traceback__)[-1]
    lines = [
        f"seed {seed}: {type(error).__name__}: {error}",
        f"  raised at {where.filename}:{where.lineno}; {result.scenario}",
        f"  replay: python -m tests.sim --seed {seed}{' --agents' * bool(result.scenario.agents)} --trace",
    ]
    return lines + ("".join(traceback.format_exception(error)).splitlines() if traced else [])
