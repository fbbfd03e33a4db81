"""Elastic rollouts: spot machines join and vanish while a fleet updates.

One joins when the others are half-way, one joins when the trainer has taken its memory back, one is killed half-way.
A star's trainer keeps its memory for whoever comes; a collective takes a rollout in at the next step, and nobody
vanishes in the middle of it: both are better off than they would be.
"""

from __future__ import annotations

import time

from bench.clusters.cluster import Topology
from bench.clusters.crew import TIMEOUT_S, TRAINER, Crew, Outcome, Plan, crew_on
from bench.clusters.tables import Bound
from bench.common import Row, limit

NAME = "elastic"
RATE_MBIT = 200.0
PLAN = Plan(total_bytes=32 << 20, piece_bytes=128 << 10, train_s=1.5)
"""The optimizer comes after about one copy: a trainer that leaves sooner takes nobody new, who waits for others."""
STEADY, SPOT = 4, 3
STEP_COPIES = 3.0
"""Between two versions of the trainer, in times of one copy: a rollout that joins a collective waits for the next."""
SLOWER_GOAL = 1.1
RING_BYTES = 128 << 10
_EARLIER_S = 0.3


def measure(quick: bool) -> list[Row]:
    """Measure all ways; `quick` leaves out NIXL."""
    steady = [f"rollout{number}" for number in range(STEADY)]
    spots = [f"spot{number}" for number in range(SPOT)]
    topology = Topology({"a": ["hub", TRAINER, *steady, *spots]}, RATE_MBIT)
    with crew_on(topology, PLAN, [*steady, *spots]) as crew:
        bound = Bound(PLAN.total_bytes, RATE_MBIT)
        rows = [Row(f"{NAME}: one copy at the rate of a link", bound.copy_s, "s")]
        for transport in ("tcp",) if quick else ("tcp", "nixl"):
            rows += _star(crew, steady, spots, bound, transport)
        rows += _collective(crew, steady, spots[0], bound)
        # Last, as it kills one of them.
        return [*rows, *_ours(crew, steady, spots, bound)]


def _ours(crew: Crew, steady: list[str], spots: list[str], bound: Bound) -> list[Row]:
    half_s = bound.copy_s / 2
    crew.connect("tcp", steady)
    for name in spots:
        crew.nodes[name].do("connect", **crew.identity(name, spot=True))
        crew.nodes[name].do("register")
    early, joiner, between = spots
    fleet = [*steady, early]
    calm = crew.ours(fleet)
    joined = crew.ours([*fleet, joiner], offsets={joiner: half_s})
    got = crew.nodes[between].do("update_at", TIMEOUT_S, at_s=0.0, version=crew.version, timeout_s=TIMEOUT_S)
    crew.check([between])
    # It begins before the others, so that they read from it.
    later = {name: _EARLIER_S for name in steady}
    killed = crew.ours(steady, offsets=later, also=lambda: _kill_half_way(crew, early, half_s))
    sent = joined.sent_bytes / bound.total_bytes
    return [
        *_joined("ours", joined.stalls_s[joiner], got["ended_s"] - got["began_s"], bound),
        limit(f"{NAME}: ours, the others while one joins / calm", _of(joined, calm, steady), "x", SLOWER_GOAL),
        Row(f"{NAME}: ours, the others while one is killed half-way / calm", _of(killed, calm, steady), "x"),
        # It reads from the trainer, which holds its memory for it until its lease is over.
        Row(f"{NAME}: ours, trainer waits while one is killed half-way", killed.trainer_s, "s"),
        Row(f"{NAME}: ours, sent by the trainer's link while one joins", sent, "models"),
    ]


def _kill_half_way(crew: Crew, name: str, half_s: float) -> None:
    """Let a rollout begin the same update as the others, and kill it when they are half-way."""
    future = crew.nodes[name].begin("update_at", at_s=0.0, version=crew.version, timeout_s=TIMEOUT_S)
    time.sleep(half_s)
    crew.nodes[name].kill()
    future.exception(TIMEOUT_S)


def _star(crew: Crew, steady: list[str], spots: list[str], bound: Bound, transport: str) -> list[Row]:
    label = "star over tcp" if transport == "tcp" else "star over NIXL/UCX"
    fleet = [*steady, spots[0]]
    calm = crew.star(fleet, transport)
    joined = crew.star([*fleet, spots[1]], transport, {spots[1]: calm.seconds / 2})
    between_s = crew.star([spots[2]], transport).seconds
    sent = joined.sent_bytes / bound.total_bytes
    return [
        *_joined(label, joined.stalls_s[spots[1]], between_s, bound),
        Row(f"{NAME}: {label}, the others while one joins / calm", _of(joined, calm, steady), "x"),
        Row(
            f"{NAME}: {label}, sent by the trainer's link while one joins",
            sent,
            "models",
        ),
    ]


def _collective(crew: Crew, steady: list[str], joiner: str, bound: Bound) -> list[Row]:
    crew.join(steady)
    began = time.monotonic()
    crew.collective(steady, "ring", RING_BYTES)
    came = began + bound.copy_s / 2
    time.sleep(max(0.0, began + STEP_COPIES * bound.copy_s - time.monotonic()))
    step = time.monotonic()
    joined_s = crew.join([*steady, joiner])
    outcome = crew.collective([*steady, joiner], "ring", RING_BYTES)
    label = f"{NAME}: collective (ring)"
    there_s = joined_s + outcome.seconds
    return [
        Row(
            f"{label}, joins half-way: until it has the weights, with the next step {STEP_COPIES:g} copies later",
            step - came + there_s,
            "s",
        ),
        Row(f"{label}, the same from the next step on (new group and broadcast)", there_s, "s"),
        Row(f"{label}, the same / bound", there_s / bound.copy_s, "x"),
    ]


def _joined(label: str, mid_s: float, between_s: float, bound: Bound) -> list[Row]:
    return [
        Row(f"{NAME}: {label}, joins half-way: until it has the weights", mid_s, "s"),
        Row(f"{NAME}: {label}, the same / bound", mid_s / bound.copy_s, "x"),
        Row(f"{NAME}: {label}, joins between steps: until it has the weights / bound", between_s / bound.copy_s, "x"),
    ]


def _of(run: Outcome, calm: Outcome, steady: list[str]) -> float:
    """Return how long the steady rollouts took, against a calm update."""
    return max(run.stalls_s[name] for name in steady) / max(calm.stalls_s[name] for name in steady)
