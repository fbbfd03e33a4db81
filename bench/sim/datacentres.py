"""Rollouts in another datacentre: how long do their GPUs stand still, and what crosses the link between the two?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.sim.assumptions import Assumption, Assumptions, Size
from bench.sim.fleet import HOME, Fleet
from bench.sim.links import Link
from bench.sim.star import better, star_times

FAR = "far"
_ANNOUNCEMENTS = 50
"""Without an agent, everybody follows what crosses for minutes: so often in all is enough, as all look themselves."""


@dataclass(frozen=True)
class Datacentres:
    """Stall of the remote replicas, in seconds each on average; models that crossed the link."""

    size: str
    remote: int
    agent_s: float
    direct_s: float
    star_s: float
    agent_crossed: float
    direct_crossed: float
    arrives_s: float
    bound_direct_s: float
    bound_agent_s: float

    @property
    def ratio(self) -> float:
        """Return how many times as long remote GPUs stand still with a star."""
        return self.star_s / self.agent_s

    @property
    def ratio_direct(self) -> float:
        """Return the same without a seed agent."""
        return self.star_s / self.direct_s


def datacentres(assumptions: Assumptions, size: Size, remote: int, seed: int = 1) -> Datacentres:
    """Simulate one version with a seed agent in host memory, without one, and as a star."""
    direct_s, direct_crossed, _ = _run(assumptions, size, remote, seed, agent=False)
    agent_s, agent_crossed, arrives_s = _run(assumptions, size, remote, seed, agent=True)
    between = Link("home to far", assumptions.between_bytes_per_s)
    star = better(*star_times(assumptions, size.shard_bytes, remote, between=between, shards=size.gpus))
    one_s = size.shard_bytes / assumptions.link_bytes_per_s
    return Datacentres(
        size.name,
        remote,
        agent_s,
        direct_s,
        sum(star) / remote,
        agent_crossed,
        direct_crossed,
        arrives_s,
        max(one_s, size.total_bytes / assumptions.between_bytes_per_s),
        one_s,
    )


def fleet_of(assumptions: Assumptions, size: Size, remote: int, seed: int, agent: bool) -> Fleet:
    """Make a trainer at home, and remote rollouts, with a seed agent or without."""
    fleet = Fleet(assumptions, size.shard_bytes, size.gpus, seed)
    fleet.add("trainer")
    if agent:
        fleet.add("agent", FAR, seeds=True)
    for number in range(remote):
        fleet.add(f"remote-{number}", FAR)
    fleet.connect(fleet.replicas.values())
    return fleet


def _run(assumptions: Assumptions, size: Size, remote: int, seed: int, agent: bool) -> tuple[float, float, float]:
    """Return the mean stall of the remote replicas, the models that crossed, and when the agent had its copy."""
    crosses_s = size.total_bytes / assumptions.between_bytes_per_s
    announce_s = max(assumptions.announce_s.value, 0.0 if agent else crosses_s / _ANNOUNCEMENTS)
    seldom = Assumption(announce_s, "s", "where all readers follow for minutes: rarer than in truth")
    fleet = fleet_of(replace(assumptions, announce_s=seldom), size, remote, seed, agent)
    rollouts = [fleet.replicas[f"remote-{number}"] for number in range(remote)]
    trainer, seed_agent = fleet.replicas["trainer"], fleet.replicas.get("agent")
    fleet.renew(trainer, fleet.pass_versions(trainer, rollouts, seed_agent) + 1)
    began_s, arrives_s = fleet.events.now, 0.0
    if seed_agent is not None:
        # Rollouts go on serving until the hub tells them of the version: when their zone has it.
        fleet.update_when_told(rollouts)
        fleet.update_all([seed_agent], [began_s])
        arrives_s = seed_agent.stall_s
    else:
        fleet.update_all(rollouts, [began_s] * remote)
    stall_s = sum(rollout.stall_s for rollout in rollouts) / remote
    return stall_s, fleet.wan[HOME, FAR].carried_bytes / size.total_bytes, arrives_s
