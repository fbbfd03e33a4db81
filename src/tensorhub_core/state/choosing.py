"""Choose what a shard reads from by the index: it looks at a bounded number of copies, however many there are.

Within a level all copies of a shelf stand in the order of their costs, but for the NIC group, of which each has a
shelf of its own: so the best of a level is the first that may be read. Levels are looked at from the lowest on, until
the next one is dearer than what was found. Copies on the reader's own machine are looked at apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from tensorhub_core.ids import CopyId, Digest, ReplicaName, VersionKey
from tensorhub_core.schedule.sources import (
    Candidate,
    Place,
    Reader,
    choose_more,
    choose_raw,
    choose_replica,
    cost_of_replica,
    prefers_replica,
)
from tensorhub_core.state.candidates import candidate_of, is_tangled, may_be_read, reader_of
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import file_again, followed_of, move_copies, move_offers, offered_by
from tensorhub_core.state.records import Copy, Group, ModelState, Worker
from tensorhub_core.state.shelves import Filed, Shelf, Slot

MOST_FOLLOWED = 64
"""Unfinished copies that are looked at for one choice; then only whole ones, of which hardly any is left out."""
MOST_EQUALS = 16
"""Idle copies that are looked at for those that a reader may read beside the best one."""


Rank = tuple[float, int, int, int, int, CopyId]
"""What a copy costs, but for whether it leaves and for its zone, which are the same for all that are compared."""


@dataclass(slots=True)
class Look:
    """One choice under way. `promised`: also among what leaves; `patient`: the reader waits also for who is late.

    `left_out` names also what the reader's own replica has. `followed` counts unfinished copies that were looked at.
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

    def may_read(self, name: CopyId) -> bool:
        """Tell whether the reader may be sent to a copy."""
        if name in self.left_out:
            return False
        return may_be_read(self.s, self.s.state.copies[name], self.reader, tangled=self.tangled, patient=self.patient)

    def beside(self, layout: Digest, leaving: bool) -> Collection[CopyId]:
        """Return the copies of a layout on the reader's own machine."""
        machine = self.reader.seat.machine
        return self.model.index.beside.get((self.key, layout, leaving, machine), ()) if machine else ()


def choose_among(
    s: Step, reader: Worker, key: VersionKey, promised: bool, left_out: Collection[CopyId], patient: bool = False
) -> list[Copy]:
    """Choose the copies a shard reads a version from, but none that is left out; empty if there are none.

    Nobody waits for those who are late, and who follows them, but with `patient`.
    """
    model, memory = s.state.models[reader.model], reader.memory
    assert memory is not None
    file_again(s, model, key)
    own = model.index.filed.get((key, reader.replica))
    look = Look(s, model, key, reader, reader_of(s, reader), promised, left_out, patient)
    if not is_offered(look, own):
        return []
    if own is not None and own.copies:
        look.left_out = {*left_out, *own.copies}
    move_copies(s, model.index, key, memory.layout)
    look.tangled = is_tangled(s, model, reader)
    best = best_copy(look, memory.layout)
    if memory.portable and (best is None or best.leaving or best.zone != look.here.place.zone):
        raw = None if best is None else candidate_of(s, s.state.copies[best.copy], best.leaving)
        shards = best_replica(look)
        if prefers_replica(look.here, raw, shards):
            return [] if shards is None else [s.state.copies[c.copy] for c in shards]
    if best is None:
        return []
    copies = s.state.copies
    return [copies[best.copy], *[copies[name] for name in more_copies(look, best)]]


def is_offered(look: Look, own: Filed | None) -> bool:
    """Tell whether any other replica offers the version than the reader's, which has filed what is its own."""
    mine = None if own is None or own.offer is None else own.offer.leaving
    offers = look.model.index.offers
    return any([offers.get((look.key, leaving), 0) > (mine is leaving) for leaving in look.leaves])


def best_copy(look: Look, layout: Digest) -> Slot | None:
    """Return where the best copy of a layout stands."""
    zone, key = look.here.place.zone, look.key
    for leaving in look.leaves:
        near = look.beside(layout, leaving)
        found = best_beside(look, near) if near else None
        shelves = [
            (shelf, zones)
            for unfinished in (False, True)
            if (zones := look.model.index.copies.get(shelf := (key, layout, leaving, unfinished, ""))) is not None
        ]
        for shelf, zones in shelves:
            if zone in zones:
                found = best_on(look, shelf, zone, near, found)
        if found is None:
            for shelf, zones in shelves:
                for other in zones:
                    if other != zone:
                        found = best_on(look, shelf, other, near, found)
        if found is not None:
            return look.model.index.slots[found[-1]]
    return None


def best_beside(look: Look, near: Collection[CopyId]) -> Rank | None:
    """Return what the best copy on the reader's own machine costs."""
    found: Rank | None = None
    here = look.here
    for name in near:
        slot = look.model.index.slots[name]
        time = here.beside * (len(look.s.state.copies[name].leases) + 1) + slot.depth * here.lag
        rank = (time, slot.depth, slot.flows, 0, rails_to(here.place, slot), name)
        if (found is None or rank < found) and look.may_read(name):
            found = rank
    return found


def best_on(look: Look, shelf: Shelf, zone: str, near: Collection[CopyId], found: Rank | None) -> Rank | None:
    """Return the cost of the best copy of a zone on some shelf, or what was found if that is better.

    Only the first of a level that may be read counts, of all and of those of the reader's NIC group: so it is exact.
    """
    ingress, lag, rail = look.here.ingress, look.here.lag, look.here.place.rail
    levels = look.model.index.copies[shelf][zone]
    mine = look.model.index.copies.get((*shelf[:4], rail), {}).get(zone, {}) if rail else {}
    for level in sorted(levels) if len(levels) > 1 else levels:
        width = (level if level > ingress else ingress) + 1
        if found is not None and width > found[0]:
            break
        for apart in (0, 1) if level in mine else (1,):
            for depth, flows, name in levels[level] if apart else mine[level]:
                rank = (width + depth * lag, depth, flows, 1, apart, name)
                if found is not None and rank >= found:
                    break
                if name in near:
                    continue
                if shelf[3]:
                    if look.followed >= MOST_FOLLOWED:
                        break
                    look.followed += 1
                if look.may_read(name):
                    found = rank
                    break
    return found


def more_copies(look: Look, best: Slot) -> list[CopyId]:
    """Return what a reader may read at the same time as its best source: the same bytes, idle, whole and no farther."""
    index, here = look.model.index, look.here.place
    names: list[CopyId] = []
    near = look.beside(best.layout, False) if best.zone == here.zone else ()
    if near:
        idle = [slot for name in near if is_idle(slot := index.slots[name])]
        names = [slot.copy for slot in sorted(idle, key=lambda slot: (rails_to(here, slot), slot.copy))]
    if not (best.host and best.host == look.reader.seat.machine):
        shelf = (look.key, best.layout, False, False)
        for rail in (here.rail, "") if here.rail else ("",):
            entries = index.copies.get((*shelf, rail), {}).get(best.zone, {}).get(0)
            if entries is not None and not (entries[0][0] or entries[0][1]):
                idle_ones = [name for one, two, name in entries[:MOST_EQUALS] if not (one or two)]
                names += [name for name in idle_ones if name not in near]
    if not names:
        return []
    copies = look.s.state.copies
    sums, left_out = copies[best.copy].sums, look.left_out
    same = [n for n in dict.fromkeys(names) if n != best.copy and n not in left_out and copies[n].sums == sums]
    return same[: look.s.state.config.policy.most_sources - 1]


def rails_to(here: Place, slot: Slot) -> int:
    """Return 0 within a NIC group and 1 between them, or if that is not known."""
    return 0 if here.rail and here.rail == slot.rail else 1


def is_idle(slot: Slot) -> bool:
    """Tell whether nobody reads a whole copy, nor by the same NIC."""
    return not (slot.unfinished or slot.level or slot.flows)


def best_replica(look: Look) -> Sequence[Candidate] | None:
    """Return the best replica, all of whose shards are needed."""
    move_offers(look.s, look.model.index, look.key)
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
    """Return the best replicas of a kind: the first of each level, and those on the reader's machine."""
    found: list[list[Candidate]] = []
    least = inf
    home = look.model.index.homes.get((look.key, kind[0], look.reader.seat.machine), ())
    for name in home if look.reader.seat.machine else ():
        offer = look.model.index.filed[look.key, name].offer
        if offer is not None and offer[:4] == kind:
            found += shards_of(look, name)
    levels = look.model.index.replicas.get(look.key, {}).get(kind, {})
    for level in sorted(levels):
        if level + 1 > least:
            break
        for _, name in levels[level]:
            if name in home or not (shards := shards_of(look, name)):
                continue
            found += shards
            least = min(least, cost_of_replica(look.here, shards[0]).time)
            break  # its equals have no shard on the reader's machine either, and later names
    return found


def shards_of(look: Look, replica: ReplicaName) -> list[list[Candidate]]:
    """Return the copies of a replica if all of them may be read: none or one list."""
    offer = offered_by(look.s, look.model.groups[replica], look.key)
    if offer is None or replica == look.reader.replica:
        return []
    leaving, copies = offer
    if all(copy.memory.portable and copy.id not in look.left_out for copy in copies):
        return [[candidate_of(look.s, copy, leaving) for copy in copies]]
    return []


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
