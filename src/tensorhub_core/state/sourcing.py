"""Turn the server's records into candidates and lease what the schedule chooses (laws L3, L12, L14)."""

from __future__ import annotations

from tensorhub_core.ids import CopyId, VersionKey, WorkerId
from tensorhub_core.schedule.sources import Candidate, Place, choose_raw, choose_replica
from tensorhub_core.state.context import Step
from tensorhub_core.state.leases import grant
from tensorhub_core.state.records import Copy, CopyState, Group, ModelState, Round, Worker


def place_of(group: Group) -> Place:
    """Return where a replica runs."""
    return Place(group.zone, group.host)


def candidate_of(s: Step, copy: Copy, depth: int = 0) -> Candidate:
    """Describe a copy to the schedule."""
    group = s.group(s.holder(copy))
    draining = copy.state is CopyState.DRAINING
    return Candidate(
        copy.id, group.replica, copy.memory.layout, place_of(group), len(copy.leases), depth=depth, draining=draining
    )


def depth_of(s: Step, copy: Copy, reader: WorkerId, seen: frozenset[CopyId] = frozenset()) -> int | None:
    """Count the unfinished copies between a copy and a whole one; None if the way leads to the reader or nowhere."""
    if copy.worker == reader or copy.id in seen:
        return None
    if copy.state is not CopyState.FILLING:
        return 0
    if not copy.offered or not copy.sums:
        return None
    follows = [s.state.leases[lease].copy for lease in s.state.workers[copy.worker].leases]
    if not follows:
        return 0 if copy.prefix == copy.memory.num_segments else None
    depths = [depth_of(s, s.state.copies[c], reader, seen | {copy.id}) for c in follows if c in s.state.copies]
    known = [d for d in depths if d is not None]
    return 1 + max(known) if len(known) == len(follows) else None


def offered_groups(s: Step, model: ModelState, key: VersionKey, promised: bool) -> list[tuple[Group, list[Copy]]]:
    """Return the replicas all of whose shards hold the version; draining ones only for rounds already promised."""
    allowed = {CopyState.PUBLISHED} | ({CopyState.DRAINING} if promised else set())
    found = []
    for group in model.groups.values():
        workers = s.members(group)
        copies = [w.copy for w in workers if w.copy is not None and w.copy.key == key and w.copy.state in allowed]
        if len(copies) == group.num_shards and not any(w.suspected for w in workers):
            found.append((group, copies))
    return found


def filling_copies(s: Step, model: ModelState, key: VersionKey, reader: Worker) -> list[tuple[Copy, int]]:
    """Return the unfinished copies that others may follow, each with its depth."""
    found = []
    for group in model.groups.values():
        if group.replica == reader.replica:
            continue
        for worker in s.members(group):
            copy = worker.copy
            if copy is None or copy.state is not CopyState.FILLING or copy.key != key or worker.suspected:
                continue
            depth = depth_of(s, copy, reader.id)
            if depth is not None:
                found.append((copy, depth))
    return found


def choose_copies(s: Step, group: Group, reader: Worker, current: Round, promised: bool) -> list[Copy]:
    """Choose the copies a shard reads the round's version from; empty if there are none."""
    key, memory = current.key, reader.memory
    if key is None or memory is None:
        return []
    model = s.model(reader)
    avoid = current.avoid.get(reader.shard, {})
    replicas = [(g, cs) for g, cs in offered_groups(s, model, key, promised) if g.replica != reader.replica]
    here = place_of(group)
    raw = [candidate_of(s, c) for _, copies in replicas for c in copies if c.id not in avoid]
    if replicas:
        fillers = filling_copies(s, model, key, reader)
        raw += [candidate_of(s, c, depth) for c, depth in fillers if c.id not in avoid]
    best = choose_raw(here, memory.layout, raw)
    if best is not None:
        return [s.state.copies[best.copy]]
    if not memory.portable:
        return []
    portable = [cs for _, cs in replicas if all(c.memory.portable and c.id not in avoid for c in cs)]
    chosen = choose_replica(here, [[candidate_of(s, c) for c in cs] for cs in portable])
    return [] if chosen is None else [s.state.copies[c.copy] for c in chosen]


def lease_shard(s: Step, group: Group, shard: int, current: Round, promised: bool) -> bool:
    """Lease sources to one shard of a promised round; False if there are none."""
    reader = s.worker_at(group, shard)
    if reader is None:
        return False
    copies = choose_copies(s, group, reader, current, promised)
    current.leases[shard] = [grant(s, group, shard, current.number, copy).id for copy in copies]
    return bool(copies)


def describe_holders(s: Step, model: ModelState, key: VersionKey) -> str:
    """Say who holds what, for the text of `VersionUnavailable`."""
    whole = sorted(g.replica for g, _ in offered_groups(s, model, key, promised=True))
    if whole:
        return f"held by {', '.join(whole[:8])}"
    held: dict[str, list[str]] = {}
    for group in model.groups.values():
        for worker in s.members(group):
            if worker.copy is not None and worker.copy.state is not CopyState.FILLING:
                held.setdefault(str(worker.copy.key[1]), []).append(f"{group.replica}/{worker.shard}")
    rows = "; ".join(f"version {v} at {', '.join(h[:8])}" for v, h in sorted(held.items())[:8])
    return f"held now: {rows}" if rows else "nobody holds any version now"
