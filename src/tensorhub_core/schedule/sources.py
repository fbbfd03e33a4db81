"""Rank the copies a reader could read from.

A reader prefers a copy of its own layout (raw, no resharding) over a replica of another layout, a near one over a far
one, and an idle one over a busy one. Unfinished copies count like whole ones, so that many readers of one version form
a chain instead of a star: a chain of N readers ends in about the time of one (FACTS.md section 5).

Copies of the reader's own layout may be read several at a time. Those beside the best one have to be idle and whole:
then they cost no other reader anything, and a chain behind one publisher stays a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub_core.ids import CopyId, Digest, ReplicaName

MOST_RAW_SOURCES = 3
"""Copies of its own layout that a reader reads at the same time."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs; empty names are unknown and near nobody."""

    zone: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that may be leased. `depth` counts the unfinished copies between its bytes and a whole one (0 = whole).

    `load` counts its readers; `sums` digests its checksums; `converted`: its dtypes are not the publisher's.
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


def distance(reader: Place, source: Place) -> int:
    """Return 0 within a zone and 1 across zones."""
    return 0 if reader.zone == source.zone else 1


def hosts_apart(reader: Place, source: Place) -> int:
    """Return 0 on one machine and 1 between machines, or if that is not known."""
    return 0 if reader.host and reader.host == source.host else 1


def rank(reader: Place, candidate: Candidate) -> tuple[bool, int, int, int, int, str]:
    """Return the sort key of a candidate; smaller is better, the copy id breaks ties."""
    return (
        candidate.draining,
        distance(reader, candidate.place),
        candidate.load,
        hosts_apart(reader, candidate.place),
        candidate.depth,
        candidate.copy,
    )


def choose_raw(reader: Place, layout: Digest, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the best candidate with the reader's own layout."""
    return min((c for c in candidates if c.layout == layout), key=lambda c: rank(reader, c), default=None)


def choose_more(reader: Place, best: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return what a reader may read at the same time as `best`: the same bytes, idle, whole and no farther."""

    def helps(other: Candidate) -> bool:
        return (
            other.copy != best.copy
            and (other.layout, other.sums) == (best.layout, best.sums)
            and not (other.draining or other.depth or other.load)
            and other.place.zone == best.place.zone
            and hosts_apart(reader, other.place) <= hosts_apart(reader, best.place)
        )

    return sorted(filter(helps, candidates), key=lambda c: rank(reader, c))[: MOST_RAW_SOURCES - 1]


def choose_replica(reader: Place, replicas: Sequence[Sequence[Candidate]]) -> Sequence[Candidate] | None:
    """Return the best replica, all of whose shards are needed; each is a non-empty sequence of candidates.

    What the publisher's numbers were rounded to comes last, however near: other readers may need them as they were.
    """

    def cost(shards: Sequence[Candidate]) -> tuple[bool, bool, int, int, str]:
        return (
            any(c.converted for c in shards),
            any(c.draining for c in shards),
            max(distance(reader, c.place) for c in shards),
            sum(c.load for c in shards),
            shards[0].replica,
        )

    return min(replicas, key=cost, default=None)
