"""How the hub's cost grows with the workers: of a version, of a choice of sources, of an idle second.

    python bench/growth.py [--quick] [--json FILE]

First the real machine of the server alone, in this process, driven by scripts through whole rounds of ever more
replicas: the law, and what each kind of message costs. Then the real hub over ZeroMQ, as many followers as this machine
carries beside it: what the messages cost on top, and at how many workers its loop would have no time left. The law is
a power of the number of workers, fitted to the cost per worker: 0 is a constant cost per reader, 1 would be a version
whose cost grows with the square of its readers. A size that would take too long is left out, and named.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import growth_hub
from common import Row, limit, parser_of, report, skipped
from growth_fleet import Fleet
from growth_hub import Figures
from many_workers import allow_files

from tensorhub_core.server.collecting import collect_seldom

NAME = "growth"
SIZES = {1: 13, 8: 9}
"""The largest number of replicas, as a power of two, by shards of each."""
SMALLEST = 3
FITTED_FROM = 64
"""Workers from which on a size counts for the law: below, what is done once a version weighs more than the readers."""
BUDGET_S = {1: 45.0, 8: 25.0}
HUB_SIZES = (1000, 4000)
HUB_S = 75.0
NEWCOMERS = 8
MOST_POWER = 0.1
FLEET = 10_000
IDLE_GOAL = 0.2
VERSION_GOAL_S = 5.0


class Point(NamedTuple):
    """One size: microseconds of the machine, per worker unless it says otherwise."""

    workers: int
    version_us: float
    choice_us: float
    late_us: float
    """To choose for one more reader, when all others hold the version."""
    beat_us: float
    tick_us: float
    worst_us: float
    """The costliest kind of a reader's message, each; its name is in `worst`."""
    worst: str


class Law(NamedTuple):
    """A cost per worker that goes with a power of the number of workers."""

    at_one_us: float
    power: float
    error: float
    """Standard error of the power."""

    def at(self, workers: float) -> float:
        """Return the cost per worker that the law gives for so many."""
        return self.at_one_us * workers**self.power


def fit(points: Sequence[tuple[float, float]]) -> Law:
    """Fit cost = a * workers ^ b to pairs of workers and cost, all of the same weight."""
    x = [math.log(workers) for workers, _ in points]
    y = [math.log(cost) for _, cost in points]
    slope, start = statistics.linear_regression(x, y)
    spread = sum((value - statistics.fmean(x)) ** 2 for value in x)
    rest = sum((b - start - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(rest / (len(x) - 2) / spread) if len(x) > 2 else math.inf
    return Law(math.exp(start), slope, error)


def measure_size(replicas: int, shards: int) -> Point:
    """Measure the machine alone with so many replicas: a second version, an idle second, newcomers."""
    fleet = Fleet(replicas, shards)
    fleet.update()
    fleet.later(1)  # what the update left to do belongs to no idle second
    fleet.costs.clear()
    fleet.later(2)
    workers = replicas * shards
    beat, tick = fleet.costs["Heartbeat"].each_us, fleet.costs["Tick"].each_us / workers
    fleet.costs.clear()
    fleet.update(ticks=True)
    costs = dict(fleet.costs)
    of_readers = {kind: cost for kind, cost in costs.items() if cost.count >= replicas}
    worst = max(of_readers, key=lambda kind: of_readers[kind].each_us)
    version = 1e6 * sum(cost.seconds for cost in costs.values()) / workers
    fleet.later(1)  # nor to who comes late
    late = [[fleet.connect(f"late-{n}", k, shards) for k in range(shards)] for n in range(NEWCOMERS)]
    fleet.costs.clear()
    fleet.join(late)
    choice = costs["JoinRound"].each_us
    return Point(
        workers, version, choice, fleet.costs["JoinRound"].each_us, beat, tick, of_readers[worst].each_us, worst
    )


def machine(shards: int, most: int, budget_s: float) -> tuple[list[Row], Law, list[Point]]:
    """Measure ever more replicas with so many shards each; return the figures and the law of a version."""
    points: list[Point] = []
    began = time.monotonic()
    took_s, factor = 0.0, 1.0
    for power in range(SMALLEST, most + 1):
        if took_s * factor > began + budget_s - time.monotonic():
            skipped(NAME, f"2^{power} to 2^{most} replicas of {shards} shards", "they would take too long")
            break
        started = time.monotonic()
        points.append(measure_size(1 << power, shards))
        before_s, took_s = took_s, time.monotonic() - started
        factor = min(4.0, took_s / before_s) if before_s else 1.0  # four where the cost goes with the square
    rows = []
    for point in points:
        case = f"machine, {point.workers // shards} x {shards}"
        rows += [
            Row(f"{case}: a version, per worker", point.version_us, "us"),
            Row(f"{case}: a version, in all", point.version_us * point.workers / 1e6, "s"),
            Row(f"{case}: join and choose, all at once", point.choice_us, "us"),
            Row(f"{case}: join and choose, one more reader", point.late_us, "us"),
            Row(f"{case}: costliest message ({point.worst})", point.worst_us, "us"),
            Row(f"{case}: a heartbeat", point.beat_us, "us"),
            Row(f"{case}: a tick, per worker", point.tick_us, "us"),
        ]
    fitted = [point for point in points if point.workers >= FITTED_FROM]
    fitted = fitted if len(fitted) > 2 else points
    laws = {
        "a version, per worker": fit([(p.workers, p.version_us) for p in fitted]),
        "one more reader's choice": fit([(p.workers, p.late_us) for p in fitted]),
    }
    for what, law in laws.items():
        case = f"machine, {shards} shards: {what} grows with workers ^"
        rows += [limit(case, law.power, "", MOST_POWER), Row(f"{case}, standard error", law.error, "")]
    return rows, laws["a version, per worker"], points


def of_hub(figures: Sequence[Figures], law: Law) -> list[Row]:
    """Return the figures of the real hub, and how far it would go by the law of the machine."""
    rows = []
    for f in figures:
        case = f"hub, {f.workers} workers"
        rows += [
            Row(f"{case}: a version without its bytes, until all hold it", f.version_s, "s"),
            Row(f"{case}: its loop was busy", 100 * f.share, "%"),
            Row(f"{case}: a version, per worker, loop", 1e6 * f.version.loop, "us"),
            Row(f"{case}: a version, per worker, ZeroMQ", 1e6 * f.version.network, "us"),
            Row(f"{case}: heartbeats", f.beats_a_second, "/s"),
            Row(f"{case}: a heartbeat, loop", 1e6 * f.beat.loop, "us"),
            Row(f"{case}: a heartbeat, ZeroMQ", 1e6 * f.beat.network, "us"),
        ]
    last = figures[-1]
    low, high = (last.version.loop * (FLEET / last.workers) ** (law.power + sign * 2 * law.error) for sign in (-1, 1))
    mean = last.version.loop * (FLEET / last.workers) ** law.power
    rows += [
        limit(f"hub, {FLEET} workers by the law: a version, loop", mean * FLEET, "s", VERSION_GOAL_S),
        Row(f"hub, {FLEET} workers by the law: a version, loop, low (2 errors)", low * FLEET, "s"),
        Row(f"hub, {FLEET} workers by the law: a version, loop, high (2 errors)", high * FLEET, "s"),
        limit(f"hub, {FLEET} idle workers: loop, share of a core", last.beat.loop * FLEET, "", IDLE_GOAL),
        Row(f"hub, {FLEET} idle workers: ZeroMQ, share of a core", last.beat.network * FLEET, ""),
    ]
    for versions in (1, 6, 60):
        case = f"hub: its loop has no time left with {versions} version{'s' * (versions > 1)} a minute, at"
        rows.append(Row(case, saturation(last, law, versions), "workers"))
    return rows


def saturation(figures: Figures, law: Law, versions_a_minute: float) -> float:
    """Return the workers of whose heartbeats and versions the loop's core is full, by the law."""
    few, many = 1.0, 1e8
    while many / few > 1.001:
        workers = math.sqrt(few * many)
        version = figures.version.loop * (workers / figures.workers) ** law.power
        busy = workers * (figures.beat.loop + version * versions_a_minute / 60)
        few, many = (workers, many) if busy < 1 else (few, workers)
    return few


def measure(quick: bool) -> list[Row]:
    """Measure everything; `quick` with few workers."""
    rows: list[Row] = []
    laws, took_s = {}, 0.0
    for shards, most in SIZES.items():
        budget_s = BUDGET_S[shards] / (6 if quick else 1)
        found, laws[shards], _ = machine(shards, most - 4 if quick else most, budget_s)
        rows += found
    figures: list[Figures] = []
    for workers in HUB_SIZES[:1] if quick else HUB_SIZES:
        began = time.monotonic()
        if figures and took_s * workers / figures[-1].workers > HUB_S:
            skipped(NAME, f"the hub with {workers} workers", "it would take too long")
            break
        figures.append(growth_hub.measure(workers, 1 if quick else 2, 2.0 if quick else 5.0))
        took_s = time.monotonic() - began
    return rows + of_hub(figures, laws[1])


def main() -> None:
    """Measure, print, write."""
    parser: argparse.ArgumentParser = parser_of(NAME, __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer workers: half a minute")
    arguments = parser.parse_args()
    allow_files()
    collect_seldom()  # as the hub's process does
    report(NAME, arguments, measure(arguments.quick))


if __name__ == "__main__":
    main()
