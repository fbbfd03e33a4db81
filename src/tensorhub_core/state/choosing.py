"""Choose what a shard reads from by the index: it looks at a bounded number of copies, however many there are.

Within a level all copies take the same time but for their lag, and are sorted by it; so the best of a level is the
first that may be read. Levels are looked at from the lowest on, until the next one is dearer than what was found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from tensorhub_core.ids import CopyId, Digest, ReplicaName, VersionKey
from tensorhub_core.schedule.sources import (
    Candidate,
    Reader,
    choose_more,
    choose_raw,
    choose_replica,
    cost_of,
    cost_of_replica,
    has_rivals,
    hosts_apart,
    prefers_replica,
)
from tensorhub_core.state.candidates import candidate_of, is_tangled, may_be_read, reader_of
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import file_again, followed_of, offered_by
from tensorhub_core.state.records import Copy, Group, ModelState, Worker

MOST_FOLLOWED = 64
"""Unfinished copies that are looked at for one choice; then only whole ones, of which hardly any is left out."""
MOST_EQUALS = 16
"""Copies of equal time that are looked at for the one on the nearest machine and NIC group."""


@dataclass(slots=True)
class Look:
    """One choice under way. `promised`: also among what leaves; `patient`: the reader waits also for who is late.

    `followed` counts the unfinished copies that were looked at.
    """

    s: Step
    model: ModelState
    key: VersionKey
    reader: Worker
    here: Reader
    promised: bool
    left_out: Collection[CopyId]
    patient: bool = False
    tangled: bool = False
    followed: int = 0

    @property
    def leaves(self) -> tuple[bool, ...]:
        """Return the kinds of replicas to look at, those first that stay."""
        return (False, True) if self.promised else (False,)


def choose_among(
    s: Step, reader: Worker, key: VersionKey, promised: bool, left_out: Collection[CopyId], patient: bool = False
) -> list[Copy]:
    """Choose the copies a shard reads a version from, but none that is left out; empty if there are none.

    Nobody waits for those who are late, and who follows them, but with `patient`.
    """
    model, memory = s.model(reader), reader.memory
    assert memory is not None
    file_again(s, model)
    look = Look(s, model, key, reader, reader_of(s, reader), promised, left_out, patient)
    look.tangled = is_tangled(s, model, reader)
    if not is_offered(look):
        return []
    best = best_copy(look, memory.layout)
    shards = best_replica(look) if memory.portable and has_rivals(look.here, best) else None
    if best is None or prefers_replica(look.here, best, shards):
        return [] if shards is None else [s.state.copies[c.copy] for c in shards]
    more = choose_more(look.here.place, best, idle_copies(look, best), s.state.config.policy.most_sources)
    return [s.state.copies[c.copy] for c in (best, *more)]


def is_offered(look: Look) -> bool:
    """Tell whether any other replica offers the version."""
    index, own = look.model.index, look.model.index.filed.get((look.key, look.reader.replica))
    mine = None if own is None else own.offer
    count = sum(index.offers.get((look.key, leaving), 0) for leaving in look.leaves)
    return count > (mine is not None and mine.leaving in look.leaves)


def best_copy(look: Look, layout: Digest) -> Candidate | None:
    """Return the best copy of a layout."""
    zone = look.here.place.zone
    for leaving in look.leaves:
        zones = look.model.index.copies.get((look.key, layout, leaving), {})
        beside = look.model.index.beside.get((look.key, layout, leaving, look.reader.seat.machine), ())
        near = [*candidates(look, sorted(beside), leaving), *of_levels(look, zones.get(zone, {}), leaving)]
        found = choose_raw(look.here, near)
        if found is None:
            found = choose_raw(
                look.here, [c for z in sorted(zones) if z != zone for c in of_levels(look, zones[z], leaving)]
            )
        if found is not None:
            return found
    return None


def candidates(look: Look, names: Iterable[CopyId], leaving: bool) -> Iterator[Candidate]:
    """Yield those of some copies that may be read."""
    for name in names:
        copy = look.s.state.copies[name]
        if copy.id in look.left_out or look.s.holder(copy).replica == look.reader.replica:
            continue
        if may_be_read(look.s, copy, look.reader, tangled=look.tangled, patient=look.patient):
            yield candidate_of(look.s, copy, leaving)


def of_levels(look: Look, levels: dict[int, list[tuple[int, int, CopyId]]], leaving: bool) -> list[Candidate]:
    """Return the best copies of a zone, those on the reader's machine apart."""
    found: list[Candidate] = []
    least = inf
    for level in sorted(levels):
        if level + 1 > least:
            break
        for candidate in of_level(look, levels[level], leaving):
            found.append(candidate)
            least = min(least, cost_of(look.here, candidate).time)
    return found


def of_level(look: Look, entries: Sequence[tuple[int, int, CopyId]], leaving: bool) -> Iterator[Candidate]:
    """Yield the first copy that may be read, and a few that are its equals."""
    first: tuple[int, int] | None = None
    equals = 0
    for depth, flows, name in entries:
        if equals >= MOST_EQUALS or first not in (None, (depth, flows)) or (depth and look.followed >= MOST_FOLLOWED):
            return
        look.followed += bool(depth)
        for candidate in candidates(look, [name], leaving):
            if hosts_apart(look.here.place, candidate.place):
                first, equals = (depth, flows), equals + 1
                yield candidate


def idle_copies(look: Look, best: Candidate) -> list[Candidate]:
    """Return whole copies that nobody reads, in the zone of the best one."""
    index, layout, zone = look.model.index, best.layout, best.place.zone
    entries = index.copies.get((look.key, layout, False), {}).get(zone, {}).get(0, [])
    idle = [name for depth, flows, name in entries[: MOST_EQUALS + 1] if not (depth or flows)]
    beside = index.beside.get((look.key, layout, False, look.reader.seat.machine), set())
    return list(candidates(look, sorted(beside.union(idle)), False))


def best_replica(look: Look) -> Sequence[Candidate] | None:
    """Return the best replica, all of whose shards are needed."""
    kinds, zone = look.model.index.replicas.get(look.key, {}), look.here.place.zone
    others = sorted({kind[3] for kind in kinds} - {zone})
    for converted in (False, True):
        for leaving in look.leaves:
            for zones in ([zone], others):
                found = [r for z in zones for r in of_kind(look, (leaving, True, converted, z))]
                best = choose_replica(look.here, found)
                if best is not None:
                    return best
    return None


def of_kind(look: Look, kind: tuple[bool, bool, bool, str]) -> list[list[Candidate]]:
    """Return the best replicas of a kind: the first few of each level, and those on the reader's machine."""
    found: list[list[Candidate]] = []
    least = inf
    home = look.model.index.homes.get((look.key, kind[0], look.reader.seat.machine), ())
    for name in sorted(home):
        offer = look.model.index.filed[look.key, name].offer
        if offer is not None and offer[:4] == kind:
            found += shards_of(look, name)
    levels = look.model.index.replicas.get(look.key, {}).get(kind, {})
    for level in sorted(levels):
        if level + 1 > least:
            break
        first: int | None = None
        equals = 0
        for load, name in levels[level]:
            if equals >= MOST_EQUALS or first not in (None, load):
                break
            for shards in shards_of(look, name):
                found.append(shards)
                first, equals = load, equals + 1
                least = min(least, cost_of_replica(look.here, shards).time)
    return found


def shards_of(look: Look, replica: ReplicaName) -> Iterator[list[Candidate]]:
    """Yield the copies of a replica, if all of them may be read."""
    offer = offered_by(look.s, look.model.groups[replica], look.key)
    if offer is None or replica == look.reader.replica:
        return
    leaving, copies = offer
    if all(copy.memory.portable and copy.id not in look.left_out for copy in copies):
        yield [candidate_of(look.s, copy, leaving) for copy in copies]


# --- by a full scan ---------------------------------------------------------------------------------------------------


def choose_by_scan(
    s: Step,
    reader: Worker,
    key: VersionKey,
    promised: bool,
    left_out: Collection[CopyId],
    patient: bool = False,
    silent: bool = False,
) -> list[Copy]:
    """Choose as `choose_among` does, but look at everything; with `silent` also at workers that are silent now."""
    model, memory, here = s.model(reader), reader.memory, reader_of(s, reader)
    assert memory is not None
    others = [o for o in offered_groups(s, model, key, promised, silent) if o[0].replica != reader.replica]
    tangled = is_tangled(s, model, reader)
    raw = [(copy, leaving) for _, leaving, copies in others for copy in copies]
    raw += [(copy, False) for copy in followed_copies(s, model, key, reader)] if others else []
    found = [
        candidate_of(s, copy, leaving)
        for copy, leaving in raw
        if copy.memory.layout == memory.layout
        and copy.id not in left_out
        and may_be_read(s, copy, reader, tangled=tangled, patient=patient)
    ]
    best = choose_raw(here, found)
    portable = [(leaving, cs) for _, leaving, cs in others if all(c.memory.portable for c in cs)]
    replicas = [
        [candidate_of(s, c, leaving) for c in cs] for leaving, cs in portable if all(c.id not in left_out for c in cs)
    ]
    shards = choose_replica(here, replicas) if memory.portable else None
    if best is None or prefers_replica(here, best, shards):
        return [] if shards is None else [s.state.copies[c.copy] for c in shards]
    more = choose_more(here.place, best, found, s.state.config.policy.most_sources)
    return [s.state.copies[c.copy] for c in (best, *more)]


def offered_groups(
    s: Step, model: ModelState, key: VersionKey, promised: bool, silent: bool = False
) -> list[tuple[Group, bool, list[Copy]]]:
    """Return the replicas all of whose shards hold the version, also staged; leaving ones only for promised rounds.

    With `silent` also those with workers that are silent at the moment.
    """
    found = []
    for replica in model.finished.get(key, ()):
        offer = offered_by(s, model.groups[replica], key, silent)
        if offer is not None and (promised or not offer[0]):
            found.append((model.groups[replica], *offer))
    return found


def followed_copies(s: Step, model: ModelState, key: VersionKey, reader: Worker) -> list[Copy]:
    """Return the unfinished copies of others that may be followed."""
    groups = [model.groups[replica] for replica in model.holders.get(key, ()) if replica != reader.replica]
    return [copy for group in groups for copy in followed_of(s, group, key)]
