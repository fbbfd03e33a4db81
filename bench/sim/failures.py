"""What failures cost: a source, a seed or the hub is killed half-way; how much longer do GPUs stand still?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.assumptions import Assumptions, Size
from bench.sim.datacentres import FAR
from bench.sim.fleet import HOME, Fleet, Replica

_HALF = 0.5


@dataclass(frozen=True)
class Failure:
    """Stalls with and without a failure; `crossed` counts the models on the link between the zones."""

    what: str
    size: str
    replicas: int
    calm_mean_s: float
    calm_last_s: float
    mean_s: float
    last_s: float
    crossed: float
    failed: int

    @property
    def added_mean_s(self) -> float:
        """Return how much longer a replica is stalled on average."""
        return self.mean_s - self.calm_mean_s


def failures(assumptions: Assumptions, size: Size, replicas: int, seed: int = 1) -> list[Failure]:
    """Simulate all kinds."""
    near, far = (lambda: _near(assumptions, size, replicas, seed)), (lambda: _far(assumptions, size, replicas, seed))
    return [
        _compare("a source in the middle of the readers is killed", size, replicas, near, _kill("rollout-0")),
        _compare("the hub is killed and restarts", size, replicas, near, lambda fleet: fleet.kill_hub()),
        _compare("the seed of a zone is killed", size, replicas, far, _kill_seed),
    ]


def _near(assumptions: Assumptions, size: Size, replicas: int, seed: int) -> Fleet:
    return _fleet(assumptions, size, replicas, seed, HOME)


def _far(assumptions: Assumptions, size: Size, replicas: int, seed: int) -> Fleet:
    return _fleet(assumptions, size, replicas, seed, FAR)


def _fleet(assumptions: Assumptions, size: Size, replicas: int, seed: int, zone: str) -> Fleet:
    fleet = Fleet(assumptions, size.shard_bytes, size.gpus, seed)
    trainer = fleet.add("trainer")
    rollouts = [fleet.add(f"rollout-{number}", zone) for number in range(replicas)]
    fleet.connect(fleet.replicas.values())
    fleet.renew(trainer, fleet.pass_versions(trainer, rollouts) + 1)
    return fleet


def _kill(name: str) -> Callable[[Fleet], None]:
    return lambda fleet: fleet.kill(fleet.replicas[name])


def _kill_seed(fleet: Fleet) -> None:
    """Kill the replica that crosses the link."""
    for replica in fleet.replicas.values():
        if any(zone == HOME for worker in replica.workers for _, _, zone in worker.sources):
            return fleet.kill(replica)


def _compare(
    what: str, size: Size, replicas: int, make: Callable[[], Fleet], strike: Callable[[Fleet], None]
) -> Failure:
    calm_mean_s, calm_last_s, _, _ = _run(make(), None, 0.0)
    mean_s, last_s, crossed, failed = _run(make(), strike, _HALF * calm_last_s)
    return Failure(what, size.name, replicas, calm_mean_s, calm_last_s, mean_s, last_s, crossed, failed)


def _run(fleet: Fleet, strike: Callable[[Fleet], None] | None, after_s: float) -> tuple[float, float, float, int]:
    rollouts: list[Replica] = [r for name, r in fleet.replicas.items() if name != "trainer"]
    now = fleet.events.now
    if strike is not None:
        fleet.events.at(now + after_s, strike, fleet)
    fleet.update_all(rollouts, [now] * len(rollouts))
    alive = [rollout for rollout in rollouts if rollout.workers[0].alive]
    stalls = [rollout.stall_s for rollout in alive]
    total = sum(shape.total_bytes for shape in fleet.shapes)
    crossed = sum(link.carried_bytes for link in fleet.wan.values()) / total
    return sum(stalls) / len(stalls), max(stalls), crossed, sum(len(rollout.errors) for rollout in alive)
