"""What reading from a copy costs, and which copies a reader reads from.

The cost of a source, the weightiest part first:

1. It is about to leave: whoever reads from it holds it up.
2. It is in another zone. What crosses zones is slow, and one copy for each zone is enough.
3. The time it takes, in times of one copy over an idle link: readers on the busier of two links, with this one, and
   the lag of every unfinished copy on the way (`Policy.lag`; `auto` counts none). The links are those that bytes leave
   the source's machine by and arrive at the reader's by; they carry bytes both ways at once, so that N readers behind
   each other end in about the time of one (FACTS.md section 5). A chain grows until its lag costs more than another
   reader at an earlier holder. A source on the reader's own machine uses no such link.
4. Fewer unfinished copies before it, fewer readers on its link, the same machine, the same NIC group; then the id.
   In this order: the last copies of chains are those that nobody reads, so that all would follow the last one.

A reader prefers a copy of its own layout (raw, no resharding) over a replica of another layout, but not one in another
zone over one in its own. Copies of its own layout may be read several at a time. Those beside the best one have to be
idle and whole: then they cost no other reader anything, and a chain behind one publisher stays a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensorhub_core.ids import CopyId, Digest, ReplicaName
from tensorhub_core.schedule.policy import AUTO

MOST_RAW_SOURCES = AUTO.most_sources
"""Copies of its own layout that a reader reads at the same time."""


class Place(NamedTuple):
    """Where a worker runs; empty names are unknown and near nobody."""

    zone: str = ""
    host: str = ""
    rail: str = ""


class Reader(NamedTuple):
    """Who looks for a source: `ingress` others read over its NIC, and a hop costs `lag` of the time of its copy."""

    place: Place
    ingress: int = 0
    lag: float = 0.0
    beside: float = AUTO.beside


class Candidate(NamedTuple):
    """A copy that may be leased. `depth` counts the unfinished copies between its bytes and a whole one (0 = whole).

    `load` counts its readers, `egress` those on its NIC. `sums` digests its checksums; `converted`: its dtypes are not
    the publisher's.
    """

    copy: CopyId
    replica: ReplicaName
    layout: Digest
    place: Place
    load: int
    sums: Digest
    depth: int = 0
    draining: bool = False
    converted: bool = False
    egress: int = 0


class Cost(NamedTuple):
    """What a source costs a reader; the smaller is better, and the first difference counts."""

    draining: bool
    zones: int
    time: float
    depth: int
    flows: int
    hosts: int
    rails: int
    copy: CopyId


def distance(reader: Place, source: Place) -> int:
    """Return 0 within a zone and 1 across zones."""
    return 0 if reader.zone == source.zone else 1


def hosts_apart(reader: Place, source: Place) -> int:
    """Return 0 on one machine and 1 between machines, or if that is not known."""
    return 0 if reader.host and reader.host == source.host and reader.zone == source.zone else 1


def rails_apart(reader: Place, source: Place) -> int:
    """Return 0 within a NIC group and 1 between them, or if that is not known."""
    return 0 if reader.rail and reader.rail == source.rail else 1


def width_of(reader: Reader, source: Candidate) -> float:
    """Return the time over the busiest link between a reader and a source, with this reader on it."""
    if hosts_apart(reader.place, source.place):
        return max(source.egress, reader.ingress) + 1
    return reader.beside * (source.load + 1)


def cost_of(reader: Reader, source: Candidate) -> Cost:
    """Return what a source costs a reader."""
    return Cost(
        source.draining,
        distance(reader.place, source.place),
        width_of(reader, source) + source.depth * reader.lag,
        source.depth,
        max(source.egress, source.load),
        hosts_apart(reader.place, source.place),
        rails_apart(reader.place, source.place),
        source.copy,
    )


def choose_raw(reader: Reader, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the best of some candidates with the reader's own layout."""
    return min(candidates, key=lambda c: cost_of(reader, c), default=None)


def choose_more(
    reader: Place, best: Candidate, candidates: Iterable[Candidate], most: int = MOST_RAW_SOURCES
) -> list[Candidate]:
    """Return what a reader may read at the same time as `best`: the same bytes, idle, whole and no farther."""

    def helps(other: Candidate) -> bool:
        return (
            other.copy != best.copy
            and (other.layout, other.sums) == (best.layout, best.sums)
            and not (other.draining or other.depth or other.load or other.egress)
            and other.place.zone == best.place.zone
            and hosts_apart(reader, other.place) <= hosts_apart(reader, best.place)
        )

    return sorted(filter(helps, candidates), key=lambda c: cost_of(Reader(reader), c))[: most - 1]


class ReplicaCost(NamedTuple):
    """What a replica of another layout costs a reader of all of its shards."""

    converted: bool
    draining: bool
    zones: int
    time: float
    load: int
    replica: ReplicaName


def cost_of_replica(reader: Reader, shards: Sequence[Candidate]) -> ReplicaCost:
    """Return what it costs to read from all shards of a replica; they are a non-empty sequence.

    What the publisher's numbers were rounded to comes last, however near: other readers may need them as they were.
    """
    return ReplicaCost(
        any(c.converted for c in shards),
        any(c.draining for c in shards),
        max(distance(reader.place, c.place) for c in shards),
        max(width_of(reader, c) for c in shards),
        sum(c.load for c in shards),
        shards[0].replica,
    )


def choose_replica(reader: Reader, replicas: Iterable[Sequence[Candidate]]) -> Sequence[Candidate] | None:
    """Return the best replica, all of whose shards are needed; each is a non-empty sequence of candidates."""
    return min(replicas, key=lambda shards: cost_of_replica(reader, shards), default=None)


def prefers_replica(reader: Reader, raw: Candidate | None, shards: Sequence[Candidate] | None) -> bool:
    """Tell whether a reader takes a replica of another layout although there may be a copy of its own."""
    if raw is None or shards is None:
        return raw is None
    cost, other = cost_of(reader, raw), cost_of_replica(reader, shards)
    return (other.converted, other.draining, other.zones) < (False, cost.draining, cost.zones)
