"""What a walk covers: who is there, and how much may go wrong on one path."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Scene:
    """One walk. The counts from `doubts` on are budgets: how often that may happen on one path.

    `verify`: readers compare what they read with its checksums, and offer what they have verified to others.
    `queues`: readers may queue behind a reader that has yet to begin. `stages`: readers stage versions and install
    them. `zones`: the readers are in another zone than the sources. `agents`: so many of the readers are seed
    agents of the zone in which all readers are. `reshards`: readers have a layout of their own, announce checksums
    and follow each other by them. `explicit`: readers may ask for a version by its number. `retain`: versions that
    no call may lose. `ahead`: by how many rounds a shard may be ahead of another one that has yet to hear how they
    ended. `hasty`: readers overwrite memory of which the server has no copy before it has heard of that. `eager`: a
    read that nothing can disturb or wait for comes before everything else (for scenes of one reader without faults).

    `delays` counts times at which agents do not come on for too long, `doubts` counts sources that are left
    although they live, `departures` workers that hand over and leave, `leaves` rounds given up and deadlines of the
    server that pass, `refusals` offload copies that cannot be made, `crashes` processes that die, `suspicions`
    silences of a living one past its lease, `burials` such past its death, `losses` connections, `restarts` of the
    server.
    """

    name: str
    sources: int = 1
    readers: int = 1
    shards: int = 2
    versions: int = 2
    verify: bool = True
    queues: bool = False
    stages: bool = False
    reshards: bool = False
    zones: bool = False
    explicit: bool = False
    agents: int = 0
    retain: int = 0
    ahead: int = 0
    hasty: bool = False
    eager: bool = False
    delays: int = 0
    doubts: int = 0
    departures: int = 0
    leaves: int = 0
    refusals: int = 0
    crashes: int = 0
    suspicions: int = 0
    burials: int = 0
    losses: int = 0
    restarts: int = 0

    def __str__(self) -> str:
        """Return what differs from a scene without anything special."""
        own = [f for f in fields(self)[1:] if f.name in _SIZES or getattr(self, f.name) != f.default]
        return f"{self.name}: " + ", ".join(f"{f.name} {int(getattr(self, f.name))}" for f in own)


_SIZES = ("sources", "readers", "shards", "versions")

CI: tuple[Scene, ...] = (
    Scene("2 sources", sources=2, eager=True),
    Scene("readers that queue", readers=2, versions=1, queues=True),
    Scene("checksums off, one is silent", verify=False, suspicions=1, versions=1),
    Scene("one is silent", suspicions=1, versions=1, leaves=1),
    Scene("a round is left", leaves=1),
    Scene("asked by number", explicit=True, versions=1),
    Scene("a shard ahead", ahead=1),
    Scene("sources that live are left", readers=2, shards=1, versions=1, queues=True, doubts=2),
    Scene("readers that reshard and follow", readers=2, shards=1, versions=1, queues=True, reshards=True, doubts=1),
    Scene("readers reshard, a round is left", readers=2, shards=1, versions=1, queues=True, reshards=True, leaves=1),
    Scene("2 zones, a round is left", readers=2, shards=1, versions=1, zones=True, leaves=1),
    Scene("2 zones, checksums off, a round is left", 1, 2, 1, 1, verify=False, zones=True, leaves=1),
    Scene("2 zones, sources that live are left", readers=2, shards=1, versions=1, zones=True, doubts=2),
    Scene("2 zones, readers reshard", readers=2, shards=1, versions=1, reshards=True, zones=True, leaves=1),
    Scene("one dies", crashes=1, shards=1, leaves=1),
    Scene("one is given up", burials=1, versions=1),
    Scene("a connection is lost", losses=1, versions=1),
    Scene("the server restarts", restarts=1, shards=1),
    Scene("a shard ahead, the server restarts", verify=False, ahead=1, restarts=1, versions=1),
    Scene("staging", stages=True, versions=1, shards=1, leaves=1, suspicions=1),
    Scene("staging, 2 shards", stages=True, versions=1),
    Scene("a seed agent", readers=2, shards=1, agents=1, delays=1),
    Scene("a seed agent, one is silent", readers=2, shards=1, versions=1, agents=1, suspicions=1),
    Scene("begun before the server knows", readers=2, shards=1, queues=True, hasty=True, leaves=1),
    Scene("begun before the server knows, 2 shards", hasty=True, leaves=1, versions=1),
    Scene("begun before the server knows, one dies", shards=1, hasty=True, crashes=1),
    Scene("begun before the server knows, one is silent", shards=1, hasty=True, suspicions=1, versions=1, leaves=1),
    Scene("begun before the server knows, it restarts", shards=1, hasty=True, restarts=1),
    Scene("retention", retain=1),
    Scene("retention, no room", retain=1, refusals=1),
    Scene("retention, one dies", retain=1, shards=1, crashes=1),
    Scene("retention, the server restarts", retain=1, shards=1, restarts=1),
    Scene("retention, two leave", readers=2, retain=1, shards=1, versions=1, departures=2),
)
"""What is walked with every change."""

NIGHTLY: tuple[Scene, ...] = (
    Scene("2 sources, every read apart", sources=2),
    Scene("2 sources, one is silent", sources=2, suspicions=1),
    Scene("2 sources, one dies", sources=2, versions=1, crashes=1, leaves=1),
    Scene("2 sources, the server restarts", sources=2, versions=1, restarts=1),
    Scene("one dies, 2 shards", crashes=1, leaves=1),
    Scene("2 readers that queue, one dies", readers=2, versions=1, queues=True, crashes=1),
    Scene("everything, single shards", shards=1, crashes=1, suspicions=1, losses=1, restarts=1, leaves=1, versions=1),
    Scene("the server restarts, 2 shards", restarts=1, versions=1),
    Scene("a shard ahead, the server restarts, checksums on", ahead=1, restarts=1, versions=1),
    Scene(
        "a shard ahead, a round is left, the server restarts", verify=False, ahead=1, leaves=1, restarts=1, versions=1
    ),
    Scene("the server restarts twice", restarts=2, versions=1),
    Scene("the server restarts, checksums off", verify=False, restarts=1, suspicions=1),
    Scene("staging, the server restarts", stages=True, versions=1, restarts=1),
    Scene("readers reshard, one dies", readers=2, shards=1, versions=1, queues=True, reshards=True, crashes=1),
    Scene("readers reshard, 2 shards", readers=2, versions=1, queues=True, reshards=True, doubts=1, crashes=1),
    Scene("readers reshard, the server restarts", readers=2, versions=1, queues=True, reshards=True, restarts=1),
    Scene("2 zones, one dies", readers=2, shards=1, versions=1, zones=True, crashes=1),
    Scene("2 zones, 2 shards, one dies", readers=2, versions=1, zones=True, crashes=1),
    Scene("2 zones, 3 readers, one dies", readers=3, shards=1, versions=1, zones=True, crashes=1),
    Scene("2 zones, the server restarts", readers=2, shards=1, versions=1, zones=True, restarts=1),
    Scene("a seed agent, one dies", readers=2, shards=1, versions=1, agents=1, crashes=1, delays=1),
    Scene("a seed agent, 2 shards", readers=2, agents=1, delays=1),
    Scene("2 seed agents, one is silent", readers=3, shards=1, agents=2, delays=1, suspicions=1, versions=1),
    Scene("begun before the server knows, 2 shards, one dies", hasty=True, crashes=1, leaves=1),
    Scene("begun before the server knows, 2 shards, it restarts", hasty=True, restarts=1, versions=1),
    Scene("begun before the server knows, readers queue, one dies", 1, 2, 1, queues=True, hasty=True, crashes=1),
    Scene("retention, 2 shards, one dies", retain=1, crashes=1),
    Scene("retention, 2 shards, the server restarts", retain=1, restarts=1),
)
"""What takes hours."""
