"""Standalone rollouts: the trainer publishes, and every rollout must have the new weights before it goes on.

One zone. In `standalone` all rollouts pause at the same moment, in `spread` one after the other, as their last answers
end: the last one when one copy has had most of its time. A star takes as long either way, and is left out there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator

from bench.clusters.cluster import Topology
from bench.clusters.crew import TRAINER, Crew, Plan, crew_on
from bench.clusters.tables import Bound, rows_of
from bench.common import Row, limit

NAME, SPREAD = "standalone", "spread"
RATE_MBIT = 200.0
PLAN = Plan(total_bytes=48 << 20, piece_bytes=192 << 10)
"""256 segments, as many as a model of 1 GB has with the default size."""
ROLLOUTS = [f"rollout{number}" for number in range(8)]
TIME_GOAL, SENT_GOAL = 1.25, 1.5
BROADCAST_BYTES, RING_BYTES = 1 << 20, 128 << 10
"""The best pieces: a broadcast is as fast with 256 KiB, and slower with 4 MiB and in one piece."""
_BOUND = Bound(PLAN.total_bytes, RATE_MBIT)


@contextlib.contextmanager
def _crew(plan: Plan = PLAN) -> Iterator[Crew]:
    with crew_on(Topology({"a": ["hub", TRAINER, *ROLLOUTS]}, RATE_MBIT), plan, ROLLOUTS) as crew:
        crew.connect("tcp", ROLLOUTS)
        yield crew


def measure(quick: bool) -> list[Row]:
    """Measure all ways when all pause at once; `quick` takes one round, and leaves out NIXL and broadcasts."""
    with _crew() as crew:
        one = statistics.median(crew.ours(ROLLOUTS[:1]).seconds for _ in range(1 if quick else 2))
        runs = sorted((crew.ours(ROLLOUTS) for _ in range(1 if quick else 3)), key=lambda run: run.seconds)
        ours = runs[len(runs) // 2]
        others = {"star over tcp": crew.star(ROLLOUTS, "tcp")}
        if not quick:
            others["star over NIXL/UCX"] = crew.star(ROLLOUTS, "nixl")
        joined_s = crew.join(ROLLOUTS)
        if not quick:
            others["collective (broadcast)"] = crew.collective(ROLLOUTS, "broadcast", BROADCAST_BYTES)
        others["collective (ring)"] = crew.collective(ROLLOUTS, "ring", RING_BYTES)
    rows = [
        Row(f"{NAME}: one copy at the rate of a link", _BOUND.copy_s, "s"),
        Row(f"{NAME}: ours, 1 rollout", one, "s"),
        limit(f"{NAME}: ours, 8 rollouts / 1 rollout", ours.seconds / one, "x", TIME_GOAL),
        limit(f"{NAME}: ours, sent by the trainer", ours.sent_bytes / PLAN.total_bytes, "models", SENT_GOAL),
        *rows_of(NAME, "ours", ours, _BOUND),
    ]
    for way, outcome in others.items():
        rows += rows_of(NAME, way, outcome, _BOUND, ours)
    return [*rows, Row(f"{NAME}: collective, to make its group", joined_s, "s")]


def measure_spread(quick: bool) -> list[Row]:
    """Measure ours and a ring when the pauses are spread over one copy's time."""
    offsets = {name: _BOUND.copy_s * number / len(ROLLOUTS) for number, name in enumerate(ROLLOUTS)}
    # The optimizer comes when all have begun: a trainer that leaves before takes nobody new, who then waits for others.
    with _crew(dataclasses.replace(PLAN, train_s=_BOUND.copy_s)) as crew:
        ours = crew.ours(ROLLOUTS, offsets=offsets)
        crew.join(ROLLOUTS)
        ring = crew.collective(ROLLOUTS, "ring", RING_BYTES, offsets)
    return [*rows_of(SPREAD, "ours", ours, _BOUND), *rows_of(SPREAD, "collective (ring)", ring, _BOUND, ours)]
