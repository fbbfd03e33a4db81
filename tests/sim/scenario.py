"""What a simulated world is made of, as data: who takes part, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tensorhub_core.schedule.policy import AUTO, Policy
from tests.sim.content import BY_COLUMNS

COLUMNS_SHARE = 0.3
"""Of the worlds: so many have a reader that is cut by columns and takes parts of segments."""
BEGIN_S = 1000.0
CALM_S = 30.0
"""Seconds after the begin at which nothing goes wrong any more."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong `at_s` seconds after the begin, for `for_s` seconds.

    `target` counts the slots of the cluster, modulo their number; `strength` is what `kind` makes of it.
    """

    kind: str
    at_s: float
    for_s: float = 1.0
    target: int = 0
    strength: float = 0.5


PROCESS_FAULTS = ("kill", "pause", "leave", "twin")
NETWORK_FAULTS = ("cut", "partition", "clog_up", "clog_down")
HUB_FAULTS = ("hub_kill", "hub_pause", "hub_partition")
DATA_FAULTS = ("fail", "stall", "flip", "lie", "slow")
KINDS = (*PROCESS_FAULTS, *NETWORK_FAULTS, *HUB_FAULTS, *DATA_FAULTS)


@dataclass(frozen=True)
class AgentPlan:
    """A seed agent of a zone. `at_rest`: what it is when all is calm: it holds the version, is gone, or is stuck."""

    name: str
    zone: str
    at_s: float = 0.0
    versions: int = 1
    same_name: bool = False
    """It starts again under the same name."""
    at_rest: str = "holds"


@dataclass(frozen=True)
class Scenario:
    """One world; everything that is not said here is drawn from `seed`."""

    seed: int
    readers: tuple[int, ...] = (2, 2)
    """Shards of each reader replica; not two, as the trainer has, means another layout, three one by columns."""
    faults: tuple[Fault, ...] = ()
    one_sided: bool = True
    retain: int = 0
    """Versions that the hub retains (law L11)."""
    queues: bool = False
    """Readers queue behind others that have yet to begin."""
    zones: tuple[str, ...] = ("",)
    hosts: int = 0
    """Zones that replicas are in, and machines that they share in each; 0 = one for each replica."""
    policy: Policy = AUTO
    """With what a hop costs: small copies form trees, large ones chains."""
    hub_kill_at_rest: bool = False
    """The hub dies once more when the last version was published."""
    joins_at_rest: bool = True
    """A newcomer asks for the last version."""
    agents: tuple[AgentPlan, ...] = ()
    agent_within_s: float = 10.0
    """How long a zone waits for agents that do not come on."""


def draw_fault(chance: random.Random, kinds: tuple[str, ...] = KINDS) -> Fault:
    """Return a fault."""
    kind = chance.choice(kinds)
    at_s = 3.0 + chance.random() * (CALM_S - 4.0)
    lasts = {"pause": 14.0, "hub_pause": 6.0, "partition": 14.0, "hub_partition": 12.0, "hub_kill": 3.0, "kill": 3.0}
    for_s = min(chance.random() ** 2 * lasts.get(kind, 6.0) + 0.05, CALM_S - at_s)
    return Fault(kind, round(at_s, 3), round(for_s, 3), chance.randrange(12), round(chance.random(), 3))


def draw(seed: int) -> Scenario:
    """Return the world of a seed."""
    chance = random.Random(f"{seed}/scenario")
    readers = tuple(2 if chance.random() < 0.8 else 1 for _ in range(chance.choice((1, 2, 2, 3))))
    faults = [draw_fault(chance) for _ in range(chance.randint(0, 9))]
    geography = random.Random(f"{seed}/geography")
    if random.Random(f"{seed}/columns").random() < COLUMNS_SHARE:
        readers = (*readers[:-1], BY_COLUMNS)
    return Scenario(
        seed,
        readers,
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        one_sided=chance.random() < 0.6,
        retain=chance.choice((0, 0, 1, 2)),
        queues=chance.random() < 0.5,
        zones=geography.choice((("",), ("",), ("home", "far"), ("home", "far", "farther"))),
        hosts=geography.choice((0, 0, 1, 2)),
        policy=geography.choice((AUTO, replace(AUTO, lag_bytes=1))),
        hub_kill_at_rest=chance.random() < 0.3,
        joins_at_rest=chance.random() < 0.5,
    )


def draw_harsh(seed: int) -> Scenario:
    """Return a world in which the hub and connections are lost again and again, for the hunt for broken promises."""
    chance = random.Random(f"{seed}/harsh")
    kinds = ("hub_kill", "hub_kill", "cut", "cut", "pause", "kill", "stall", "flip", "partition")
    faults = [draw_fault(chance, kinds) for _ in range(14)]
    ordered = tuple(sorted(faults, key=lambda fault: fault.at_s))
    return Scenario(seed, (2, 2), ordered, one_sided=False, retain=seed % 2, hub_kill_at_rest=seed % 3 == 0)


def draw_columns(seed: int) -> Scenario:
    """Return a world whose readers take parts of segments, while bytes go wrong and their sources come and go."""
    chance = random.Random(f"{seed}/parts")
    kinds = ("flip", "flip", "flip", "lie", "stall", "kill", "pause", "cut", "hub_kill")
    faults = [draw_fault(chance, kinds) for _ in range(10)]
    ordered = tuple(sorted(faults, key=lambda fault: fault.at_s))
    return Scenario(seed, (BY_COLUMNS,), ordered, one_sided=False, retain=seed % 2)


def draw_agents(seed: int) -> Scenario:
    """Return a world with seed agents that come late, die, stop, or bring nothing; in a fifth nothing goes wrong."""
    chance = random.Random(f"{seed}/agents")
    zones = chance.choice((("home", "far"), ("home", "far"), ("home", "far", "farther")))
    plans = [
        AgentPlan(
            f"agent{number}",
            zones[1] if number < 2 else chance.choice(zones),
            at_s=chance.choice((0.0, 0.0, 6.0 * chance.random(), 20.0 * chance.random())),
            versions=chance.choice((1, 1, 2)),
            same_name=chance.random() < 0.3,
            at_rest=chance.choice(("holds", "holds", "gone", "stuck")),
        )
        for number in range(chance.choice((1, 1, 2, 3)))
    ]
    readers = tuple(chance.choice((2, 2, 2, 1, BY_COLUMNS)) for _ in range(chance.choice((1, 2, 3))))
    struck = [n for n in range(2 + sum(readers) + len(plans))]
    kinds = (*KINDS, "kill", "kill", "pause", "leave", "hub_kill")
    faults = [draw_fault(chance, kinds) for _ in range(chance.choice((0, 2, 4, 6, 8)))]
    faults = [replace(f, target=chance.choice((f.target, *struck[-len(plans) :]))) for f in faults]
    return Scenario(
        seed,
        readers,
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        one_sided=chance.random() < 0.6,
        retain=chance.choice((0, 0, 1)),
        zones=zones,
        hub_kill_at_rest=chance.random() < 0.2,
        joins_at_rest=chance.random() < 0.5,
        agents=tuple(plans),
        agent_within_s=chance.choice((2.0, 4.0, 10.0)),
    )
