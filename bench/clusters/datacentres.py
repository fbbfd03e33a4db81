"""Rollouts in other datacentres: the trainer in one zone, rollouts in two others, behind long links that are slower.

Counted where the long links end: how many models cross into each zone. Rollouts update in three ways: at once, staged
beside what they serve, and behind a seed agent of their zone (`tensorhub seed --zone`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.clusters.cluster import Topology, Wan
from bench.clusters.crew import TIMEOUT_S, TRAINER, Crew, Outcome, Plan, crew_on
from bench.clusters.tables import Bound, rows_of
from bench.common import Row, limit, skipped

from tensorhub_core.state.requests import Hello

NAME = "datacentres"
RATE_MBIT = 200.0
WAN = Wan(rate_mbit=50, latency_ms=20)
PLAN = Plan(total_bytes=16 << 20, piece_bytes=64 << 10, train_s=1.0)
ZONES, ROLLOUTS = ("b", "c"), 3
CROSS_GOAL = 1.1
"""Models that may cross into a zone: one, with the headers of its packets and what the hub is told meanwhile."""
RING_BYTES = 128 << 10


def measure(quick: bool) -> list[Row]:
    """Measure all ways; `quick` leaves out NIXL."""
    zones = {zone: [f"{zone}{number}" for number in range(ROLLOUTS)] for zone in ZONES}
    agents = {zone: f"agent-{zone}" for zone in ZONES}
    hosts = {"a": ["hub", TRAINER], **{zone: [*names, agents[zone]] for zone, names in zones.items()}}
    rollouts = [name for names in zones.values() for name in names]
    with crew_on(Topology(hosts, RATE_MBIT, WAN), PLAN, rollouts) as crew:
        return _all(crew, rollouts, agents, quick)


def _all(crew: Crew, rollouts: list[str], agents: dict[str, str], quick: bool) -> list[Row]:
    bound = Bound(PLAN.total_bytes, WAN.rate_mbit)
    crew.connect("tcp", rollouts)
    runs = {"ours": crew.ours(rollouts), "ours, staged": crew.ours(rollouts, "stage_at")}
    ours = runs["ours"]
    if "seeds" in Hello.__struct_fields__:
        with seed_agents(crew, agents):
            crew.ours(rollouts, "follow")
            runs["ours, behind seed agents"] = crew.ours(rollouts, "follow")
    else:
        skipped(NAME, "seed agents", "this version has none")
    runs["star over tcp"] = crew.star(rollouts, "tcp")
    if not quick:
        runs["star over NIXL/UCX"] = crew.star(rollouts, "nixl")
    crew.join(rollouts)
    runs["collective (ring)"] = crew.collective(rollouts, "ring", RING_BYTES)
    rows = [Row(f"{NAME}: one copy at the rate of the long link", bound.copy_s, "s")]
    for way, outcome in runs.items():
        rows += rows_of(NAME, way, outcome, bound, None if outcome is ours else ours)
        rows += _crossed(way, outcome)
    return rows


def _crossed(way: str, outcome: Outcome) -> list[Row]:
    """Return the models that have crossed into each zone; ours are held to one."""
    rows = []
    for zone in ZONES:
        label, models = f"{NAME}: {way}, into zone {zone}", outcome.entered_bytes[zone] / PLAN.total_bytes
        held = way.startswith("ours")
        rows.append(limit(label, models, "models", CROSS_GOAL) if held else Row(label, models, "models"))
    return rows


@contextlib.contextmanager
def seed_agents(crew: Crew, agents: dict[str, str]) -> Iterator[None]:
    """Run a seed agent in every zone, on a host of its own, until it holds what there is."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_seed_agent(crew, zone, host)) for zone, host in agents.items()]
        for process in started:
            assert process.stdout is not None
            end_s = time.monotonic() + TIMEOUT_S
            while not process.stdout.readline().startswith(f"holds {crew.model}"):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit("a seed agent did not take the version that there is")
        yield


@contextlib.contextmanager
def _seed_agent(crew: Crew, zone: str, host: str) -> Iterator[subprocess.Popen[str]]:
    command = [*crew.cluster.hosts[host].command, sys.executable, "-m", "tensorhub_core.cli.main", "seed"]
    options = ["--model", crew.model, "--zone", zone, "--server", crew.server, "--replica", f"seed-{zone}"]
    settings = {"SEGMENT_BYTES": PLAN.piece_bytes, "INTERFACE": "eth0", "CLOSE_TIMEOUT_S": 5, "HOST": host}
    env = {**os.environ, **{f"TENSORHUB_{name}": str(value) for name, value in settings.items()}}
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
