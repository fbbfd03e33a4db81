"""An index of what can be read, so that a choice looks at few copies however many there are.

Whatever changes what a replica offers of a version, or what it costs, marks it (`mark`); what is marked is filed again
before the next choice. `invariants.py` compares everything else with a full scan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, TypeVar

from tensorhub_core.ids import ReplicaName, VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.manifests import may_be_followed
from tensorhub_core.state.records import OFFERED, UNFINISHED, Copy, CopyState, Group, ModelState, Worker
from tensorhub_core.state.shelves import Filed, Index, Offer, Slot, Stand

T = TypeVar("T")


def mark(s: Step, worker: Worker) -> None:
    """Look again at all that a worker has, before the next choice."""
    stale = s.model(worker).index.stale
    for copy in worker.copies():
        stale[copy.key, worker.replica] = None


def mark_copy(s: Step, worker: Worker, copy: Copy) -> None:
    """Look again at what a replica has of the version of one of its copies, before the next choice."""
    s.model(worker).index.stale[copy.key, worker.replica] = None


def offered_by(s: Step, group: Group, key: VersionKey, silent: bool = False) -> tuple[bool, list[Copy]] | None:
    """Return the copies of all shards of a replica that offers a version, and whether any of them leaves; else None.

    With `silent` also that of a replica with workers that are silent at the moment.
    """
    workers = s.members(group)
    copies = [copy for w in workers if (copy := w.copy_of(key, OFFERED)) is not None]
    if len(copies) != group.num_shards or (not silent and any(w.suspected for w in workers)):
        return None
    return any(copy.state is CopyState.DRAINING for copy in copies), copies


def followed_of(s: Step, group: Group, key: VersionKey) -> Iterator[Copy]:
    """Yield the unfinished copies of a replica that others may follow."""
    for worker in s.members(group):
        copy = worker.unfinished()
        if copy is not None and copy.key == key and is_offered_early(s, worker, copy):
            yield copy


def is_offered_early(s: Step, worker: Worker, copy: Copy) -> bool:
    """Tell whether others may follow an unfinished copy."""
    return s.state.config.policy.follows and not worker.suspected and may_be_followed(copy)


def describe(s: Step, model: ModelState, key: VersionKey, replica: ReplicaName) -> Filed | None:
    """Return how a replica is to be filed; None if it has nothing of a version."""
    group = model.groups.get(replica)
    if group is None:
        return None
    workers = s.members(group)
    slots: list[Slot] = []
    offer, unfinished = None, False
    found = offered_by(s, group, key)
    if found is not None:
        leaving, copies = found
        slots = [slot_of(s, s.holder(copy), copy, leaving) for copy in copies]
        offer = offer_of(group, leaving, copies, slots)
    for worker in workers:
        copy = worker.unfinished()
        if copy is not None and copy.key == key:
            unfinished = True
            if is_offered_early(s, worker, copy):
                slots.append(slot_of(s, worker, copy, False))
    return Filed(tuple(slots), offer, unfinished) if slots or unfinished else None


def offer_of(group: Group, leaving: bool, copies: list[Copy], slots: list[Slot]) -> Offer:
    """Return where a replica is to stand that offers all shards."""
    portable, converted, level, load = True, False, 0, 0
    for copy, slot in zip(copies, slots, strict=True):
        portable, converted = portable and copy.memory.portable, converted or copy.converted
        level, load = max(level, slot.level), load + len(copy.leases)
    hosts = tuple(sorted({slot.host for slot in slots if slot.host}))
    return Offer(leaving, portable, converted, group.zone, group.replica, hosts, level, load)


def slot_of(s: Step, holder: Worker, copy: Copy, leaving: bool) -> Slot:
    """Return where a copy is to stand."""
    place, nic, machine = holder.seat
    egress, load = s.state.flows.egress.get(nic, 0), len(copy.leases)
    flows, depth = egress if egress > load else load, copy.depth + 1 if copy.state in UNFINISHED else 0
    return Slot(copy.memory.layout, leaving, place.zone, copy.id, machine, nic, egress, depth, flows)


def file_again(s: Step, model: ModelState) -> None:
    """File again what was marked."""
    index = model.index
    for key, replica in index.stale:
        old, new = index.filed.get((key, replica)), describe(s, model, key, replica)
        if old == new:
            continue
        if old is not None and new is not None and is_only_busier(old, new):
            move(index, key, replica, old, new)
            continue
        stand: Stand = (model.name, key, replica)
        if old is not None:
            take_out(s, index, key, old, stand)
        if new is not None:
            put_in(s, index, key, new, stand)
    index.stale.clear()


def is_only_busier(old: Filed, new: Filed) -> bool:
    """Tell whether what a replica has differs only in how many read it, or in how far from a whole copy it is."""
    if old.unfinished != new.unfinished or len(old.copies) != len(new.copies):
        return False
    if (old.offer or ())[:6] != (new.offer or ())[:6]:
        return False
    return all(was[:6] == now[:6] for was, now in zip(old.copies, new.copies, strict=True))


def move(index: Index, key: VersionKey, replica: ReplicaName, old: Filed, new: Filed) -> None:
    """Let what is busier, or less so, stand at another level of the same shelves."""
    index.filed[key, replica] = new
    for was, now in zip(old.copies, new.copies, strict=True):
        if was != now:
            shelf = index.copies[key, was.layout, was.leaving][was.zone]
            _remove(shelf, was.level, was.entry)
            insort(shelf.setdefault(now.level, []), now.entry)
    before, after = old.offer, new.offer
    if before is not None and after is not None and before != after:
        kinds = index.replicas[key][before[:4]]
        _remove(kinds, before.level, (before.load, replica))
        insort(kinds.setdefault(after.level, []), (after.load, replica))


def put_in(s: Step, index: Index, key: VersionKey, filed: Filed, stand: Stand) -> None:
    """File what a replica has."""
    index.filed[key, stand[2]] = filed
    if filed.unfinished:
        index.filling.setdefault(key, set()).add(stand[2])
    for slot in filed.copies:
        shelf = index.copies.setdefault((key, slot.layout, slot.leaving), {}).setdefault(slot.zone, {})
        insort(shelf.setdefault(slot.level, []), slot.entry)
        if slot.host:
            index.beside.setdefault((key, slot.layout, slot.leaving, slot.host), set()).add(slot.copy)
        s.state.flows.stands.setdefault(slot.nic, set()).add(stand)
    if (offer := filed.offer) is not None:
        kinds = index.replicas.setdefault(key, {}).setdefault(offer[:4], {})
        insort(kinds.setdefault(offer.level, []), (offer.load, offer.replica))
        index.offers[key, offer.leaving] = index.offers.get((key, offer.leaving), 0) + 1
        for host in offer.hosts:
            index.homes.setdefault((key, offer.leaving, host), set()).add(offer.replica)


def take_out(s: Step, index: Index, key: VersionKey, filed: Filed, stand: Stand) -> None:
    """Take out what a replica had; nothing empty stays behind."""
    del index.filed[key, stand[2]]
    if filed.unfinished:
        _discard(index.filling, key, stand[2])
    for slot in filed.copies:
        zones = index.copies[key, slot.layout, slot.leaving]
        _remove(zones[slot.zone], slot.level, slot.entry)
        _drop_empty(zones, slot.zone)
        _drop_empty(index.copies, (key, slot.layout, slot.leaving))
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


def _remove(levels: dict[int, list[T]], level: int, entry: T) -> None:
    entries: list[Any] = levels[level]
    del entries[bisect_left(entries, entry)]
    _drop_empty(levels, level)


def _discard(sets: dict[Any, set[T]], name: object, member: T) -> None:
    sets[name].discard(member)
    _drop_empty(sets, name)


def _drop_empty(table: dict[Any, Any], name: object) -> None:
    if not table[name]:
        del table[name]


def disagreements(s: Step, model: ModelState) -> Iterator[str]:
    """Yield where the index differs from a full scan, but for what is marked."""
    index = model.index
    stands = {(key, replica) for key, names in model.holders.items() for replica in names} | index.filed.keys()
    for key, replica in sorted(stands - index.stale.keys()):
        if index.filed.get((key, replica)) != describe(s, model, key, replica):
            yield f"{replica} is filed wrongly under {key}"
    fresh = Index()
    shadow = Step(s.state, s.now)
    before, s.state.flows.stands = s.state.flows.stands, {}
    for (key, replica), filed in index.filed.items():
        put_in(shadow, fresh, key, filed, (model.name, key, replica))
    mine, s.state.flows.stands = s.state.flows.stands, before
    for name in ("copies", "beside", "replicas", "homes", "offers", "filling"):
        if getattr(fresh, name) != getattr(index, name):
            yield f"{name} of the index of {model.name} are not those of what is filed"
    for nic, names in before.items():
        if {stand for stand in names if stand[0] == model.name} != mine.get(nic, set()):
            yield f"what can be read by {nic} is not what is filed"
