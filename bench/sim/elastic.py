"""Elastic rollouts: spot replicas come, go and die while versions are made; how long does an update take them?"""

from __future__ import annotations

from dataclasses import dataclass

from bench.sim.assumptions import Assumptions, Size
from bench.sim.fleet import Fleet, Replica
from bench.sim.star import better, broadcast_s, setup_s, star_times


@dataclass(frozen=True)
class Elastic:
    """Mean time of an update of spot replicas that come at the same moment; what it costs the others.

    In a plain star each reads when it comes, all at once; the star lets them read one after the other if better,
    for which somebody has to order them.
    """

    size: str
    standing: int
    joiners: int
    ours_s: float
    ours_last_s: float
    star_s: float
    star_last_s: float
    plain_star_s: float
    nccl_s: float
    bound_s: float
    sent_models: float

    @property
    def ratio(self) -> float:
        """Return how many times as long it takes with a star."""
        return self.star_s / self.ours_s

    @property
    def gap(self) -> float:
        """Return how many times as long as it had to be it takes."""
        return self.ours_s / self.bound_s


def joining(assumptions: Assumptions, size: Size, standing: int, joiners: int, seed: int = 1) -> Elastic:
    """Let spot replicas come at once to a fleet that has the version; in a star all of them read from the trainer."""
    fleet = Fleet(assumptions, size.shard_bytes, size.gpus, seed)
    trainer = fleet.add("trainer")
    old = [fleet.add(f"rollout-{number}") for number in range(standing)]
    fleet.connect([trainer, *old])
    fleet.pass_versions(trainer, old)
    spots = [fleet.add(f"spot-{number}", spot=True) for number in range(joiners)]
    began_s = fleet.events.now
    fleet.connect(spots)
    connect_s = fleet.events.now - began_s
    fleet.update_all(spots, [fleet.events.now] * joiners)
    ours = [spot.stall_s + connect_s for spot in spots]
    plain, ordered = star_times(assumptions, size.shard_bytes, joiners)
    star = better(plain, ordered)
    ranks = standing + joiners
    nccl_s = setup_s(assumptions, (ranks + 1) * size.gpus) + broadcast_s(assumptions, size.shard_bytes, ranks)
    return Elastic(
        size.name,
        standing,
        joiners,
        sum(ours) / joiners,
        max(ours),
        sum(star) / joiners,
        max(star),
        sum(plain) / joiners,
        nccl_s,
        size.shard_bytes / assumptions.link_bytes_per_s,
        sum(worker.out.carried_bytes for worker in trainer.workers) / size.total_bytes,
    )


@dataclass(frozen=True)
class Churn:
    """Updates of all rollouts over some versions, while spot replicas die in the middle of them and others come."""

    size: str
    versions: int
    standing: int
    spots: int
    killed: int
    ours_s: float
    calm_s: float
    star_s: float
    nccl_s: float
    failed: int


def churn(
    assumptions: Assumptions, size: Size, standing: int, spots: int, share: float, seed: int = 1, versions: int = 3
) -> Churn:
    """Let a share of the spot replicas be killed in the middle of each update, and as many new ones come then."""
    fleet = Fleet(assumptions, size.shard_bytes, size.gpus, seed)
    trainer = fleet.add("trainer")
    firm = [fleet.add(f"rollout-{number}") for number in range(standing)]
    loose = [fleet.add(f"spot-{number}", spot=True) for number in range(spots)]
    fleet.connect([trainer, *firm, *loose])
    one_s = size.shard_bytes / assumptions.link_bytes_per_s
    stalls: list[float] = []
    killed = failed = 0
    first = fleet.pass_versions(trainer, [*firm, *loose]) + 1
    for version in range(first, first + versions):
        fleet.renew(trainer, version)
        now = fleet.events.now
        doomed = fleet.random.sample(loose, int(share * spots))
        for spot in doomed:
            fleet.events.at(now + fleet.random.uniform(0.1, 0.9) * one_s, fleet.kill, spot)
        fleet.update_all([*firm, *loose], [now] * (standing + len(loose)))
        loose = [spot for spot in loose if spot not in doomed]
        fresh = [fleet.add(f"spot-{version}-{number}", spot=True) for number in range(len(doomed))]
        fleet.connect(fresh)
        fleet.update_all(fresh, [fleet.events.now] * len(fresh))
        loose += fresh
        killed += len(doomed)
        stalls += [replica.stall_s for replica in (*firm, *loose)]
        failed += sum(len(replica.errors) for replica in (*firm, *loose))
    total = standing + spots
    star = better(*star_times(assumptions, size.shard_bytes, total))
    setup = setup_s(assumptions, (total + 1) * size.gpus)
    return Churn(
        size.name,
        versions,
        standing,
        spots,
        killed,
        sum(stalls) / len(stalls),
        calm(assumptions, size, total),
        sum(star) / total,
        setup + broadcast_s(assumptions, size.shard_bytes, total),
        failed,
    )


def calm(assumptions: Assumptions, size: Size, replicas: int) -> float:
    """Return the mean time of an update in which nobody dies."""
    fleet = Fleet(assumptions, size.shard_bytes, size.gpus)
    trainer = fleet.add("trainer")
    rollouts: list[Replica] = [fleet.add(f"rollout-{number}") for number in range(replicas)]
    fleet.connect([trainer, *rollouts])
    fleet.renew(trainer, fleet.pass_versions(trainer, rollouts) + 1)
    fleet.update_all(rollouts, [fleet.events.now] * replicas)
    return sum(rollout.stall_s for rollout in rollouts) / replicas
