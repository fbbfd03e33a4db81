"""Standalone rollouts: a trainer publishes, all rollouts get the version; how long do GPUs stand still for it?"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bench.sim.assumptions import Assumptions, Size
from bench.sim.fleet import Fleet
from bench.sim.star import better, broadcast_s, star_times


@dataclass(frozen=True)
class Standalone:
    """Stall of one version, in seconds, summed over all GPUs, the trainer's too. `bound`: bytes / network card."""

    size: str
    gpus: int
    replicas: int
    skew_s: float
    ours: float
    nccl: float
    nccl_whole: float
    star: float
    bound: float
    ours_last_s: float
    hub_busy: float
    hub_waits_s: float
    sent_models: float
    announcements: int

    @property
    def ratio(self) -> float:
        """Return how many times as long GPUs stand still with a collective."""
        return self.nccl / self.ours

    @property
    def gap(self) -> float:
        """Return how many times as long as it had to be GPUs stand still with ours."""
        return self.ours / self.bound


@functools.lru_cache
def standalone(assumptions: Assumptions, size: Size, replicas: int, skew_s: float, seed: int = 1) -> Standalone:
    """Simulate one version after others: all hold the one before it."""
    fleet = Fleet(assumptions, size.shard_bytes, size.gpus, seed)
    trainer = fleet.add("trainer")
    rollouts = [fleet.add(f"rollout-{number}") for number in range(replicas)]
    fleet.connect([trainer, *rollouts])
    version = fleet.pass_versions(trainer, rollouts) + 1
    busy_s = fleet.hub.busy_s
    publish_s = fleet.renew(trainer, version)
    ready = [fleet.random.uniform(0.0, skew_s) if skew_s else 0.0 for _ in rollouts]
    now = fleet.events.now
    fleet.update_all(rollouts, [now + each for each in ready])
    lasted_s = fleet.events.now - now
    ours = size.gpus * (sum(rollout.stall_s for rollout in rollouts) + publish_s)
    ranks = replicas + 1
    # One communicator for each shard, from the trainer's shard to everybody's: no byte goes where it is not needed.
    gather = [max(ready) - each for each in (*ready, 0.0)]
    shard_s = broadcast_s(assumptions, size.shard_bytes, replicas)
    whole_s = broadcast_s(assumptions, size.total_bytes, replicas * size.gpus)
    star = better(*star_times(assumptions, size.shard_bytes, replicas, ready))
    return Standalone(
        size.name,
        replicas * size.gpus,
        replicas,
        skew_s,
        ours=ours,
        nccl=size.gpus * (sum(gather) + ranks * shard_s),
        nccl_whole=size.gpus * (sum(gather) + ranks * whole_s),
        star=size.gpus * sum(star),
        bound=size.gpus * replicas * size.shard_bytes / assumptions.link_bytes_per_s,
        ours_last_s=max(rollout.stall_s for rollout in rollouts),
        hub_busy=(fleet.hub.busy_s - busy_s) / max(lasted_s, 1e-9),
        hub_waits_s=fleet.hub.most_waiting_s,
        sent_models=sum(worker.out.carried_bytes for worker in trainer.workers) / size.total_bytes,
        announcements=sum(worker.progress.announced for worker in fleet.workers()),
    )
