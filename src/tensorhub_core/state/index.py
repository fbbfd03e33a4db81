"""An index of what can be read, so that a choice looks at few copies however many there are.

Whatever changes what a replica offers of a version marks it (`mark`): it is filed again as a whole before the next
choice of that version. Mostly it is only read by more or fewer than before (`note_readers`): then its copies stand
elsewhere on the same shelves, and those of a layout are moved before the next choice among them. `invariants.py`
compares everything else with a full scan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, TypeVar

from tensorhub_core.ids import Digest, ReplicaName, VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.manifests import may_be_followed
from tensorhub_core.state.records import OFFERED, UNFINISHED, Copy, CopyState, Group, ModelState, Worker
from tensorhub_core.state.shelves import OFFERS, Filed, Index, Offer, Shelf, Slot, Stand

T = TypeVar("T")


def mark(s: Step, worker: Worker) -> None:
    """Look again at all that a worker has, before the next choice."""
    stale = s.model(worker).index.stale
    for copy in worker.copies():
        stale.setdefault(copy.key, {})[worker.replica] = None


def mark_copy(s: Step, worker: Worker, copy: Copy) -> None:
    """Look again at what a replica has of the version of one of its copies, before the next choice."""
    stale = s.state.models[worker.model].index.stale
    replicas = stale.get(copy.key)
    if replicas is None:
        replicas = stale[copy.key] = {}
    replicas[worker.replica] = None


def note_readers(index: Index, key: VersionKey, replica: ReplicaName) -> None:
    """Take note that more or fewer than before read what a replica has of a version, or by the same NIC."""
    if (key, replica) in index.filed:
        moves = index.moves.get(key)
        if moves is None:
            moves = index.moves[key] = {}
        elif replica in moves:
            del moves[replica]  # it goes to the end
        index.notes += 1
        moves[replica] = index.notes


def offered_by(s: Step, group: Group, key: VersionKey, silent: bool = False) -> tuple[bool, list[Copy]] | None:
    """Return the copies of all shards of a replica that offers a version, and whether any of them leaves; else None.

    With `silent` also that of a replica with workers that are silent at the moment.
    """
    copies: list[Copy] = []
    leaving = False
    if len(group.members) != group.num_shards:
        return None
    for worker in s.members(group):
        copy = worker.copy_of(key, OFFERED)
        if copy is None or (worker.suspected and not silent):
            return None
        copies.append(copy)
        leaving = leaving or copy.state is CopyState.DRAINING
    return leaving, copies


def followed_of(s: Step, group: Group, key: VersionKey) -> Iterator[Copy]:
    """Yield the unfinished copies of a replica that others may follow."""
    for worker in s.members(group):
        copy = worker.unfinished()
        if copy is not None and copy.key == key and is_offered_early(s, worker, copy):
            yield copy


def is_offered_early(s: Step, worker: Worker, copy: Copy) -> bool:
    """Tell whether others may follow an unfinished copy."""
    return s.state.config.policy.follows and not worker.suspected and may_be_followed(copy)


def describe(s: Step, model: ModelState, key: VersionKey, replica: ReplicaName) -> tuple[Filed, list[Slot]] | None:
    """Return how a replica is to be filed, and where its copies stand; None if it has nothing of a version."""
    group = model.groups.get(replica)
    if group is None:
        return None
    slots: list[Slot] = []
    offer, unfinished = None, False
    found = offered_by(s, group, key) if replica in model.finished.get(key, ()) else None
    if found is not None:
        leaving, copies = found
        slots = [slot_of(s, s.holder(copy), copy, leaving) for copy in copies]
        offer = offer_of(group, leaving, copies, slots)
    for worker in s.members(group):
        copy = worker.unfinished()
        if copy is not None and copy.key == key:
            unfinished = True
            if is_offered_early(s, worker, copy):
                slots.append(slot_of(s, worker, copy, False))
    if not slots and not unfinished:
        return None
    return Filed(tuple([slot.copy for slot in slots]), offer, unfinished), slots


def offer_of(group: Group, leaving: bool, copies: list[Copy], slots: list[Slot]) -> Offer:
    """Return where a replica is to stand that offers all shards."""
    portable, converted, level, load = True, False, 0, 0
    for copy, slot in zip(copies, slots, strict=True):
        portable, converted = portable and copy.memory.portable, converted or copy.converted
        level, load = max(level, slot.level), load + len(copy.leases)
    hosts = tuple(sorted({slot.host for slot in slots if slot.host}))
    names = tuple([copy.id for copy in copies])
    return Offer(leaving, portable, converted, group.zone, group.replica, hosts, names, level, load)


def slot_of(s: Step, holder: Worker, copy: Copy, leaving: bool) -> Slot:
    """Return where a copy is to stand."""
    place, nic, machine = holder.seat
    unfinished = copy.state in UNFINISHED
    level, depth = s.state.flows.egress.get(nic, 0), copy.depth + 1 if unfinished else 0
    flows = max(level, len(copy.leases))
    entry = (depth, flows, copy.id)
    zone, rail, layout = place.zone, place.rail, copy.memory.layout
    return Slot(layout, leaving, unfinished, zone, rail, copy.id, machine, nic, level, depth, flows, entry)


def file_again(s: Step, model: ModelState, key: VersionKey | None = None) -> None:
    """File again what was marked, of one version or of all."""
    stale = model.index.stale
    for each in list(stale) if key is None else [key] if key in stale else ():
        for replica in stale.pop(each):
            file_replica(s, model, each, replica)


def file_replica(s: Step, model: ModelState, key: VersionKey, replica: ReplicaName) -> None:
    """File what a replica has of a version now."""
    index, old, found = model.index, model.index.filed.get((key, replica)), describe(s, model, key, replica)
    if old is not None:
        if found is not None and found[0] == old and all(index.slots[slot.copy] == slot for slot in found[1]):
            return
        take_out(s, index, key, old, (model.name, key, replica))
    if found is not None:
        put_in(s, index, key, *found, (model.name, key, replica))


def move_copies(s: Step, index: Index, key: VersionKey, layout: Digest) -> None:
    """Let the copies of a layout that more or fewer read than before stand at the level where they belong."""
    for replica in moved_since(index, key, layout):
        for name in index.filed[key, replica].copies:
            was = index.slots[name]
            if was.layout != layout:
                continue
            copy = s.state.copies[name]
            level = s.state.flows.egress.get(was.nic, 0)
            flows = max(level, len(copy.leases))
            if (level, flows) == (was.level, was.flows):
                continue
            now = Slot(*was[:8], level, was.depth, flows, (was.depth, flows, name))
            index.slots[name] = now
            for shelf in shelves_of(key, was):
                levels = index.copies[shelf][was.zone]
                _remove(levels, was.level, was.entry)
                _insert(levels, level, now.entry)


def move_offers(s: Step, index: Index, key: VersionKey) -> None:
    """Let the replicas that more or fewer read than before stand at the level where they belong."""
    for replica in moved_since(index, key, OFFERS):
        filed = index.filed[key, replica]
        was = filed.offer
        if was is None:
            continue
        egress = s.state.flows.egress
        level = max([egress.get(index.slots[name].nic, 0) for name in was.copies])
        load = sum([len(s.state.copies[name].leases) for name in was.copies])
        if (level, load) == (was.level, was.load):
            continue
        index.filed[key, replica] = filed._replace(offer=was._replace(level=level, load=load))
        kinds = index.replicas[key][was[:4]]
        _remove(kinds, was.level, (was.load, replica))
        _insert(kinds, level, (load, replica))


def moved_since(index: Index, key: VersionKey, what: Digest) -> list[ReplicaName]:
    """Return the replicas to look at again because of their readers, for a layout or the offers; they are looked at."""
    moves = index.moves.get(key)
    if moves is None:
        return []
    moved = index.moved.setdefault(key, {})
    last, found = moved.get(what, 0), []
    for replica in reversed(moves):
        if moves[replica] <= last:
            break
        found.append(replica)
    moved[what] = index.notes
    return found


def shelves_of(key: VersionKey, slot: Slot) -> list[Shelf]:
    """Return the shelves on which a copy stands: with all of its kind, and with those of its NIC group."""
    of_all = (key, slot.layout, slot.leaving, slot.unfinished, "")
    return [of_all, (*of_all[:4], slot.rail)] if slot.rail else [of_all]


def put_in(s: Step, index: Index, key: VersionKey, filed: Filed, slots: list[Slot], stand: Stand) -> None:
    """File what a replica has."""
    index.filed[key, stand[2]] = filed
    if filed.unfinished:
        index.filling.setdefault(key, set()).add(stand[2])
    for slot in slots:
        index.slots[slot.copy] = slot
        for shelf in shelves_of(key, slot):
            _insert(index.copies.setdefault(shelf, {}).setdefault(slot.zone, {}), slot.level, slot.entry)
        if slot.host:
            index.beside.setdefault((key, slot.layout, slot.leaving, slot.host), set()).add(slot.copy)
        s.state.flows.stands.setdefault(slot.nic, set()).add(stand)
    if (offer := filed.offer) is not None:
        kinds = index.replicas.setdefault(key, {}).setdefault(offer[:4], {})
        _insert(kinds, offer.level, (offer.load, offer.replica))
        index.offers[key, offer.leaving] = index.offers.get((key, offer.leaving), 0) + 1
        for host in offer.hosts:
            index.homes.setdefault((key, offer.leaving, host), set()).add(offer.replica)


def take_out(s: Step, index: Index, key: VersionKey, filed: Filed, stand: Stand) -> None:
    """Take out what a replica had; nothing empty stays behind."""
    del index.filed[key, stand[2]]
    if filed.unfinished:
        _discard(index.filling, key, stand[2])
    if stand[2] in index.moves.get(key, ()):
        del index.moves[key][stand[2]]
        if not index.moves[key]:
            del index.moves[key]
            index.moved.pop(key, None)
    for name in filed.copies:
        slot = index.slots.pop(name)
        for shelf in shelves_of(key, slot):
            zones = index.copies[shelf]
            _remove(zones[slot.zone], slot.level, slot.entry)
            _drop_empty(zones, slot.zone)
            _drop_empty(index.copies, shelf)
        if slot.host:
            _discard(index.beside, (key, slot.layout, slot.leaving, slot.host), slot.copy)
        if stand in s.state.flows.stands.get(slot.nic, ()):  # two shards may share a NIC
            _discard(s.state.flows.stands, slot.nic, stand)
    if (offer := filed.offer) is not None:
        kinds = index.replicas[key]
        _remove(kinds[offer[:4]], offer.level, (offer.load, offer.replica))
        _drop_empty(kinds, offer[:4])
        _drop_empty(index.replicas, key)
        index.offers[key, offer.leaving] -= 1
        _drop_empty(index.offers, (key, offer.leaving))
        for host in offer.hosts:
            _discard(index.homes, (key, offer.leaving, host), offer.replica)


def _insert(levels: dict[int, Any], level: int, entry: object) -> None:
    entries = levels.get(level)
    if entries is None:
        levels[level] = [entry]
    else:
        insort(entries, entry)


def _remove(levels: dict[int, list[T]], level: int, entry: T) -> None:
    entries: list[Any] = levels[level]
    del entries[bisect_left(entries, entry)]
    if not entries:
        del levels[level]


def _discard(sets: dict[Any, set[T]], name: object, member: T) -> None:
    sets[name].discard(member)
    _drop_empty(sets, name)


def _drop_empty(table: dict[Any, Any], name: object) -> None:
    if not table[name]:
        del table[name]


# --- compared with a full scan ----------------------------------------------------------------------------------------


def disagreements(s: Step, model: ModelState) -> Iterator[str]:
    """Yield where the index differs from a full scan, but for what is marked."""
    index = model.index
    stands = {(key, replica) for key, names in model.holders.items() for replica in names} | index.filed.keys()
    marked = {(key, replica) for key, names in index.stale.items() for replica in names}
    for key, replica in sorted(stands - marked):
        if not is_filed_well(s, model, key, replica):
            yield f"{replica} is filed wrongly under {key}"
    fresh = Index()
    shadow = Step(s.state, s.now)
    before, s.state.flows.stands = s.state.flows.stands, {}
    for (key, replica), filed in index.filed.items():
        slots = [index.slots[name] for name in filed.copies]
        put_in(shadow, fresh, key, filed, slots, (model.name, key, replica))
    mine, s.state.flows.stands = s.state.flows.stands, before
    for name in ("copies", "beside", "replicas", "homes", "offers", "filling", "slots"):
        if getattr(fresh, name) != getattr(index, name):
            yield f"{name} of the index of {model.name} are not those of what is filed"
    if not {(k, r) for k, names in index.moves.items() for r in names} <= index.filed.keys():
        yield f"readers of what is not filed are noted in the index of {model.name}"
    if not index.moved.keys() <= index.moves.keys():
        yield f"the index of {model.name} remembers versions that it has not"
    for nic, names in before.items():
        if {stand for stand in names if stand[0] == model.name} != mine.get(nic, set()):
            yield f"what can be read by {nic} is not what is filed"


def is_filed_well(s: Step, model: ModelState, key: VersionKey, replica: ReplicaName) -> bool:
    """Tell whether what a replica has stands where it belongs, but for the levels that are to be looked at again."""
    filed, found = model.index.filed.get((key, replica)), describe(s, model, key, replica)
    if filed is None or found is None:
        return filed is None and found is None
    note, moved = model.index.moves.get(key, {}).get(replica, 0), model.index.moved.get(key, {})

    def settled(slot: Slot) -> Slot:
        moves = note > moved.get(slot.layout, 0)
        return slot._replace(level=0, flows=0, entry=(0, 0, slot.copy)) if moves else slot

    slots = [model.index.slots[name] for name in filed.copies]
    if (filed.copies, filed.unfinished) != (found[0].copies, found[0].unfinished):
        return False
    offers = [filed.offer, found[0].offer]
    if note > moved.get(OFFERS, 0):
        offers = [None if offer is None else offer._replace(level=0, load=0) for offer in offers]
    return offers[0] == offers[1] and list(map(settled, slots)) == list(map(settled, found[1]))
