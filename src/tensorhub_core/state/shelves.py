"""Leases, the links that they go by, and an index of what can be read, sorted by what it costs; `index.py` keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tensorhub_core.ids import CopyId, Digest, LeaseId, ModelName, ReplicaName, TicketId, VersionKey, WorkerId
from tensorhub_core.schedule.sources import Place


@dataclass(slots=True)
class Lease:
    """A reader's right to read a copy."""

    id: LeaseId
    reader: WorkerId
    copy: CopyId
    round: int
    tickets: set[TicketId] = field(default_factory=set)
    """What its reader has asked its source and not heard yet."""
    told: int = -1
    """Of a copy without a manifest: of how many segments its reader was told the checksums."""
    since_s: float = 0.0
    egress: str = ""
    ingress: str = ""
    crosses: tuple[VersionKey, str] | None = None
    """The NIC that it leaves by, the one that it arrives by, what crosses into which zone under it; see `links`."""


@dataclass(slots=True)
class Ticket:
    """A reader's question for checksums of cuts, until its source answers. Its cuts are passed on, not kept."""

    id: TicketId
    lease: LeaseId
    source: WorkerId
    request: int
    cuts: int


class Seat(NamedTuple):
    """Where a worker runs, and the names of its NIC and its machine."""

    place: Place = Place()
    nic: str = ""
    """That it reads and is read by; one of its own where its machine is not known."""
    machine: str = ""
    """Empty if it is not known."""


NO_SEAT = Seat()


class Slot(NamedTuple):
    """Where a copy stands: with those of its layout, in its zone, at its level, in this order there."""

    layout: Digest
    leaving: bool
    unfinished: bool
    zone: str
    rail: str
    copy: CopyId
    host: str
    """Names the machine; empty if it is not known."""
    nic: str
    level: int
    """How many read by its NIC: a read from it over the network takes at least the time of so many copies and one."""
    depth: int
    flows: int
    entry: tuple[int, int, CopyId]
    """What stands there: the two before, in the order in which they count, and the copy."""


class Offer(NamedTuple):
    """Where a replica stands that offers all shards; `level` is that of its busiest one."""

    leaving: bool
    portable: bool
    converted: bool
    zone: str
    replica: ReplicaName
    hosts: tuple[str, ...]
    copies: tuple[CopyId, ...]
    level: int
    load: int


class Filed(NamedTuple):
    """What a replica has of a version that can be read."""

    copies: tuple[CopyId, ...]
    offer: Offer | None
    unfinished: bool


OFFERS = Digest(b"")
"""Stands for no layout, but for what replicas offer."""

Entries = list[tuple[int, int, CopyId]]
Shelf = tuple[VersionKey, Digest, bool, bool, str]
"""What stands together: version, layout, whether it leaves, whether it is unfinished, and one NIC group, or none."""
Stand = tuple[ModelName, VersionKey, ReplicaName]
"""What a replica has of a version."""


@dataclass(slots=True)
class Flows:
    """Leases by the NICs that they leave by, readers by those that they arrive by, and what can be read by a NIC.

    `rates` remembers, by two zones, who crossed from one into the other last, and at how many bytes/s.
    """

    egress: dict[str, int] = field(default_factory=dict)
    ingress: dict[str, int] = field(default_factory=dict)
    stands: dict[str, set[Stand]] = field(default_factory=dict)
    rates: dict[tuple[str, str], tuple[tuple[ReplicaName, float], ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Index:
    """What can be read of one model.

    `copies` by shelf and zone; `beside` those by version, layout, whether they leave, and machine; `replicas` by
    version and kind (leaves, portable, converted, zone), `homes` those by machine; `offers` counts them by version and
    whether they leave. `filed` and `slots` say where everything stands. Of each version, `stale` is what has to be
    looked at before the next choice.
    """

    copies: dict[Shelf, dict[str, dict[int, Entries]]] = field(default_factory=dict)
    beside: dict[tuple[VersionKey, Digest, bool, str], set[CopyId]] = field(default_factory=dict)
    replicas: dict[VersionKey, dict[tuple[bool, bool, bool, str], dict[int, list[tuple[int, ReplicaName]]]]] = field(
        default_factory=dict
    )
    homes: dict[tuple[VersionKey, bool, str], set[ReplicaName]] = field(default_factory=dict)
    offers: dict[tuple[VersionKey, bool], int] = field(default_factory=dict)
    filling: dict[VersionKey, set[ReplicaName]] = field(default_factory=dict)
    filed: dict[tuple[VersionKey, ReplicaName], Filed] = field(default_factory=dict)
    slots: dict[CopyId, Slot] = field(default_factory=dict)
    stale: dict[VersionKey, dict[ReplicaName, None]] = field(default_factory=dict)
    moves: dict[VersionKey, dict[ReplicaName, int]] = field(default_factory=dict)
    """Replicas that more or fewer read than before, in the order of the last notes of it, with their numbers."""
    moved: dict[VersionKey, dict[Digest, int]] = field(default_factory=dict)
    """The note up to which the copies of a layout, or the offers, stand at the level where they belong."""
    notes: int = 0
    broken: set[CopyId] = field(default_factory=set)
    """Copies that are followed and have no source themselves at the moment; also some that have one again."""
    late: set[CopyId] = field(default_factory=set)
    """Copies that nobody should wait for, as of the last look at the time."""
    slow: set[CopyId] = field(default_factory=set)
    """Of those, the ones that come from another zone far more slowly than the link lets them."""
    crossing: dict[tuple[VersionKey, str], set[LeaseId]] = field(default_factory=dict)
    """Leases under which a version is read into a zone from another one."""
    orphans: set[WorkerId] = field(default_factory=set)
    """Workers that have lost their sources; also some that have others by now."""
