"""Who keeps a version, and whom one can rely on (law L11); changes nothing but the index of who holds what.

A replica is *reliable* if it is not spot and none of its workers is suspected or about to leave. What is only staged
protects from nothing: it is about to be installed or discarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from tensorhub_core.errors import ConfigError
from tensorhub_core.ids import ModelName, ReplicaName, VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.records import Copy, CopyState, Group, ModelState, Registration, VersionRecord, Worker


def kept_copies(s: Step, group: Group, key: VersionKey) -> list[Copy]:
    """Return a finished copy of every shard, in registered or offload memory; empty if some shard has none."""
    copies: list[Copy] = []
    for worker in s.members(group):
        copy = worker.kept_copy(key)
        if copy is None:
            return []
        copies.append(copy)
    return copies if len(copies) == group.num_shards else []


def is_lively(s: Step, group: Group) -> bool:
    """Tell whether no worker of a replica is silent or about to leave."""
    return not any(w.suspected or w.leaving for w in s.members(group))


def is_reliable(s: Step, group: Group) -> bool:
    """Tell whether versions can rely on a replica."""
    return not group.spot and is_lively(s, group)


def is_retained(model: ModelState, record: VersionRecord) -> bool:
    """Tell whether no client's call may lose a version."""
    return model.retain > 0 and record.was_whole and not record.keeping.released


def is_protected(s: Step, model: ModelState, group: Group, record: VersionRecord, *, by_custody: bool = False) -> bool:
    """Tell whether a version would be kept without a replica; for a spot replica another spot one will do.

    With `by_custody` also by one that is withdrawing it, but has to keep it.
    """
    keeping = record.keeping
    would_do = keeping.held if group.spot else keeping.firm
    few, many = sorted((keeping.whole, would_do), key=len)  # there may be thousands of the one, and none of the other
    kept: Iterator[ReplicaName] = (other for other in few if other in many)
    if by_custody:
        kept = chain(kept, (other for other in keeping.custody if other in would_do))
    return any(other != group.replica and is_lively(s, model.groups[other]) for other in kept)


def is_free(s: Step, model: ModelState, group: Group, record: VersionRecord) -> bool:
    """Tell whether nothing is lost when a replica lets a version go."""
    if not is_retained(model, record) or group.replica not in record.keeping.held:
        return True
    return is_protected(s, model, group, record, by_custody=True)


def is_withdrawing(s: Step, group: Group, key: VersionKey) -> bool:
    """Tell whether some shard takes its registered memory back and has not offloaded it yet."""
    for worker in s.members(group):  # most replicas that are asked do not
        if worker.copy is not None and worker.copy.state is CopyState.DRAINING and withdraws(worker, key):
            return True
    return False


def withdraws(worker: Worker, key: VersionKey) -> bool:
    """Tell whether a worker takes its registered memory back, which is all it has of this version."""
    copy = worker.kept_copy(key)
    return copy is not None and copy is worker.copy and copy.state is CopyState.DRAINING


def is_kept_back(s: Step, copy: Copy) -> bool:
    """Tell whether a draining copy cannot be withdrawn yet: its replica has to keep the version, and has no other."""
    holder = s.holder(copy)
    record = s.model(holder).versions.get(copy.key)
    in_custody = record is not None and holder.replica in record.keeping.custody
    return in_custody and copy is holder.copy and holder.offload_of(copy.key) is None


def custodians(s: Step, model: ModelState, key: VersionKey, reader: ReplicaName | None = None) -> list[Group]:
    """Return the replicas that will offer a version again as soon as they have made an offload copy."""
    record = model.versions.get(key)
    found = [] if record is None else sorted(record.keeping.custody & record.keeping.held)
    groups = (group for name in found if name != reader and (group := model.groups.get(name)) is not None)
    return [group for group in groups if not any(w.suspected for w in s.members(group))]


def review(s: Step, name: ModelName, replica: ReplicaName, key: VersionKey) -> None:
    """Bring up to date whether a replica holds a version, and what follows for good from that it is whole there."""
    model = s.state.models[name]
    record, group = model.versions.get(key), model.groups.get(replica)
    if record is None:
        return
    keeping = record.keeping
    copies = [] if group is None else kept_copies(s, group, key)
    whole = bool(copies) and all(copy.state is CopyState.PUBLISHED for copy in copies)
    if copies and replica not in keeping.held:
        keeping.let_go.discard(replica)  # it has all of it again: what was decided when it had not, does not count
    firm = bool(copies) and group is not None and not group.spot
    for names, belongs in ((keeping.held, bool(copies)), (keeping.firm, firm), (keeping.whole, whole)):
        names.add(replica) if belongs else names.discard(replica)
    if group is None or is_over(s, group, key, held=bool(copies)):
        keeping.custody.discard(replica)
        keeping.let_go.discard(replica)
    if whole and group is not None:
        keeping.reachable = True
        if is_reliable(s, group):
            keeping.safe = True
            if replica != record.creator and keeping.secured_by is None:
                keeping.secured_by = replica


def is_over(s: Step, group: Group, key: VersionKey, *, held: bool) -> bool:
    """Tell whether a replica has withdrawn a version from all of its registered memory, or goes on publishing it."""
    left = [w for w in s.members(group) if w.copy is not None and w.copy.key == key]
    return not left or (held and not is_withdrawing(s, group, key))


def check_room(s: Step, worker: Worker, memory: Registration, room_bytes: int | None) -> None:
    """Refuse to publish what could not be kept later; raises ConfigError.

    What the worker keeps of versions that this one will take the place of is counted as free.
    """
    model, group = s.model(worker), s.group(worker)
    if model.retain == 0 or group.spot or room_bytes is None:
        return
    newest_first = sorted(worker.offloads, key=lambda copy: copy.key, reverse=True)
    room_bytes += sum(copy.memory.total_bytes for copy in newest_first[model.retain - 1 :])
    keepers = (g for g in model.groups.values() if g.keeper and g is not group)
    if memory.total_bytes <= room_bytes or any(is_reliable(s, keeper) for keeper in keepers):
        return
    raise ConfigError(
        f"the newest {model.retain} versions of model {model.name!r} are retained, which may take an offload copy of "
        f"{memory.total_bytes:,} bytes here, but offload_limit_bytes leaves {room_bytes:,}: raise offload_limit_bytes, "
        "run the server with retain = 0, or a `tensorhub seed --keep` that keeps them"
    )
