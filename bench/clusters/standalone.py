"""Standalone rollouts: the trainer publishes, and every rollout must have the new weights before it goes on.

One zone. Rollouts pause at the same moment, or one after the other as their last answers end (`spread`).
"""

from __future__ import annotations

import statistics

from bench.clusters.cluster import Topology
from bench.clusters.crew import TRAINER, Crew, Outcome, Plan, crew_on
from bench.clusters.tables import Bound, best, rows_of
from bench.common import Row, limit

NAME = "standalone"
RATE_MBIT = 200.0
PLAN = Plan(total_bytes=32 << 20, piece_bytes=128 << 10)
ROLLOUTS = 8
TIME_GOAL, SENT_GOAL = 1.25, 1.5
BROADCASTS = (256 << 10, 1 << 20, 4 << 20)
RINGS = (128 << 10, 512 << 10)


def measure(quick: bool) -> list[Row]:
    """Measure all ways; `quick` takes the smaller half of everything."""
    rollouts = [f"rollout{number}" for number in range(ROLLOUTS)]
    topology = Topology({"a": ["hub", TRAINER, *rollouts]}, RATE_MBIT)
    with crew_on(topology, PLAN, rollouts) as crew:
        return _all(crew, rollouts, quick)


def _all(crew: Crew, rollouts: list[str], quick: bool) -> list[Row]:
    bound = Bound(PLAN.total_bytes, RATE_MBIT)
    spread = {name: bound.copy_s * number / ROLLOUTS for number, name in enumerate(rollouts)}
    crew.connect("tcp", rollouts)
    rounds = 1 if quick else 3
    one = statistics.median(crew.ours(rollouts[:1]).seconds for _ in range(rounds))
    runs = sorted((crew.ours(rollouts) for _ in range(rounds)), key=lambda run: run.seconds)
    ours = runs[len(runs) // 2]
    late = crew.ours(rollouts, offsets=spread)
    star = crew.star(rollouts, "tcp")
    rows = [
        Row(f"{NAME}: one copy at the rate of a link", bound.copy_s, "s"),
        Row(f"{NAME}: 1 rollout", one, "s"),
        limit(f"{NAME}: ours, 8 rollouts / 1 rollout", ours.seconds / one, "x", TIME_GOAL),
        limit(f"{NAME}: ours, sent by the trainer", ours.sent_bytes / PLAN.total_bytes, "models", SENT_GOAL),
        *rows_of(NAME, "ours", ours, bound),
        *rows_of(NAME, "star over tcp", star, bound, ours),
    ]
    if not quick:
        rows += rows_of(NAME, "star over NIXL/UCX", crew.star(rollouts, "nixl"), bound, ours)
    joined_s = crew.join(rollouts)
    found = collectives(crew, rollouts, quick)
    for label, outcome in best(found).items():
        rows += rows_of(NAME, label, outcome, bound, ours)
    rows.append(Row(f"{NAME}: collective, to make its group", joined_s, "s"))
    rows += _spread(crew, rollouts, spread, late, quick)
    return rows


def collectives(crew: Crew, rollouts: list[str], quick: bool) -> dict[str, dict[int, Outcome]]:
    """Run the collectives in several sizes of pieces."""
    ways = {"broadcast": BROADCASTS[1:2] if quick else BROADCASTS, "ring": RINGS[:1] if quick else RINGS}
    return {way: {size: crew.collective(rollouts, way, size) for size in sizes} for way, sizes in ways.items()}


def _spread(crew: Crew, rollouts: list[str], spread: dict[str, float], ours: Outcome, quick: bool) -> list[Row]:
    bound, label = Bound(PLAN.total_bytes, RATE_MBIT), f"{NAME}, pauses spread over one copy's time"
    rows = rows_of(label, "ours", ours, bound)
    if not quick:
        rows += rows_of(label, "star over tcp", crew.star(rollouts, "tcp", spread), bound, ours)
    return rows + rows_of(label, "collective (ring)", crew.collective(rollouts, "ring", RINGS[0], spread), bound, ours)
