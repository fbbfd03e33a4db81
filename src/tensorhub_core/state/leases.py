"""Leases and copies: who may read what, and when a copy may be withdrawn (laws L3, L4)."""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub_core.ids import CopyId, LeaseId, VersionKey
from tensorhub_core.state.bounds import MOST_CUTS
from tensorhub_core.state.calling import is_orphaned
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import mark_copy, note_readers
from tensorhub_core.state.keeping import is_kept_back
from tensorhub_core.state.links import forget_lease, note_lease
from tensorhub_core.state.manifests import SUM_BYTES, known_sums, set_known
from tensorhub_core.state.messages import DropOffload, LeaseLost, Ok, Source, SourceProgress
from tensorhub_core.state.records import UNFINISHED, Copy, CopyState, Group, Lease, ModelState, Worker
from tensorhub_core.state.tickets import end_with_lease


def grant(s: Step, group: Group, shard: int, round_number: int, copy: Copy) -> Lease:
    """Lease a copy to the worker of a shard."""
    reader = s.state.workers[group.members[shard]]
    lease = Lease(LeaseId(s.new_id("l")), reader.id, copy.id, round_number, since_s=s.now)
    s.state.leases[lease.id] = lease
    note_lease(s, lease, copy)
    reader.leases.add(lease.id)
    copy.leases.add(lease.id)
    note_readers(s.model(reader).index, copy.key, s.holder(copy).replica)
    return lease


def source_of(s: Step, lease_id: LeaseId) -> Source:
    """Describe a lease's copy to its reader; who reads one without a manifest hears of its checksums from then on."""
    lease = s.state.leases[lease_id]
    copy = s.state.copies[lease.copy]
    holder = s.holder(copy)
    group = s.group(holder)
    partial = copy.partial and copy.state in UNFINISHED
    lease.told = len(copy.known) // SUM_BYTES if partial else -1
    return Source(
        lease=lease.id,
        worker=holder.id,
        replica=holder.replica,
        shard=holder.shard,
        num_shards=group.num_shards,
        layout=copy.memory.layout,
        placement=copy.memory.placement,
        sums=copy.sums,
        whole=copy.state not in UNFINISHED,
        prefix=copy.prefix,
        converted=copy.converted,
        partial=partial,
        known=copy.known if partial else b"",
    )


def end_lease(s: Step, lease_id: LeaseId) -> Lease | None:
    """End a lease; ended ones are ignored."""
    lease = s.state.leases.get(lease_id)
    if lease is None:
        return None
    end_with_lease(s, lease)
    del s.state.leases[lease_id]
    forget_lease(s, lease)
    if (reader := s.state.workers.get(lease.reader)) is not None:
        reader.leases.discard(lease_id)
        note_broken(s, reader)
    if (copy := s.state.copies.get(lease.copy)) is not None:
        copy.leases.discard(lease_id)
        holder = s.holder(copy)
        note_readers(s.model(holder).index, copy.key, holder.replica)
        if copy.state is CopyState.DRAINING:
            s.touch(holder)
    return lease


def note_broken(s: Step, reader: Worker) -> None:
    """Remember an unfinished copy that has lost its last source and is followed."""
    own = reader.unfinished()
    if not reader.leases and own is not None and own.leases:
        s.model(reader).index.broken.add(own.id)


def revoke_lease(s: Step, lease_id: LeaseId, reason: str) -> None:
    """End a lease against its reader's will and tell it; until it has other sources it is an orphan (law L3)."""
    lease = end_lease(s, lease_id)
    reader = None if lease is None else s.state.workers.get(lease.reader)
    if lease is None or reader is None:
        return
    s.touch(reader)
    open_round = s.group(reader).rounds.get(lease.round)
    if open_round is None or open_round.verdict is not None:
        return
    joined = open_round.joined.get(reader.shard)
    if joined is not None and joined.done_request is None:
        joined.orphaned_since_s = s.now
        s.model(reader).index.orphans.add(reader.id)
        s.push(reader, LeaseLost(lease.round, lease_id, reason))


def drop_copy(s: Step, copy: Copy, reason: str) -> None:
    """Forget a copy: nobody may read it any more, whoever does is told."""
    holder = s.holder(copy)
    s.touch(holder)
    set_known(s, copy, b"")
    s.state.copies.pop(copy.id, None)
    s.state.draining.discard(copy.id)
    if holder.copy is copy:
        holder.copy = None
    if holder.staged is copy:
        holder.staged = None
    if holder.awaited is copy:
        holder.awaited = None
    if copy.id in s.state.offloads:
        s.state.offloads.discard(copy.id)
        holder.offloads.remove(copy)
    s.note(holder, copy.key)
    mark_copy(s, holder, copy)
    forget_holder(s, holder, copy.key)
    for lease_id in sorted(copy.leases):
        revoke_lease(s, lease_id, reason)
    copy.leases.clear()
    unbind_manifest(s, s.model(holder), copy)


def forget_holder(s: Step, holder: Worker, key: VersionKey) -> None:
    """Take a replica out of a version's holders when none of its shards has a copy any more, or none all of it."""
    unfinished = False
    for worker in s.members(s.group(holder)):
        for copy in worker.copies():
            if copy.key == key and copy.state not in UNFINISHED:
                return
            unfinished = unfinished or copy.key == key
    model = s.model(holder)
    for holders in (model.finished,) if unfinished else (model.finished, model.holders):
        replicas = holders.get(key, {})
        replicas.pop(holder.replica, None)
        if not replicas:
            holders.pop(key, None)


def unbind_manifest(s: Step, model: ModelState, copy: Copy) -> None:
    """Let go of the first manifest of a version that never was whole once nobody holds those bytes any more."""
    record = model.versions.get(copy.key)
    if record is None or record.was_whole:
        return
    layout = copy.memory.layout
    others = (c for c in s.state.copies.values() if c.key == copy.key and s.holder(c).model == model.name)
    if not any(c.memory.layout == layout for c in others):
        record.manifests.pop(layout, None)
    if not record.manifests:
        del model.versions[copy.key]


def add_copy(s: Step, worker: Worker, copy: Copy, *, staged: bool = False) -> None:
    """Make a copy the worker's own, in its registered or in its staging memory."""
    if staged:
        worker.staged = copy
    else:
        worker.copy = copy
    _hold(s, worker, copy)


def add_awaited(s: Step, worker: Worker, copy: Copy) -> None:
    """Make a copy the one that the worker will fill next."""
    worker.awaited = copy
    _hold(s, worker, copy, touch=False)  # its round has just been looked at: it was promised what this will hold


def add_offload(s: Step, worker: Worker, copy: Copy) -> None:
    """Add a copy in host memory that keeps a version (law L11)."""
    worker.offloads.append(copy)
    s.state.offloads.add(copy.id)
    _hold(s, worker, copy)


def _hold(s: Step, worker: Worker, copy: Copy, *, touch: bool = True) -> None:
    s.state.copies[copy.id] = copy
    mark_copy(s, worker, copy)
    s.model(worker).holders.setdefault(copy.key, {})[worker.replica] = None
    if copy.state not in UNFINISHED:  # nobody keeps a version by what it has yet to get
        note_finished(s, worker, copy.key)
        s.note(worker, copy.key)
    if touch:
        s.touch(worker)


def note_finished(s: Step, worker: Worker, key: VersionKey) -> None:
    """Take note that a worker has all of its copy of a version."""
    s.model(worker).finished.setdefault(key, {})[worker.replica] = None


def tell_followers(s: Step, copy: Copy) -> None:
    """Tell the readers of a copy how far they may read, and by which checksums if they have no manifest."""
    whole = copy.state not in UNFINISHED
    if not copy.leases:
        return
    for lease_id in sorted(copy.leases) if len(copy.leases) > 1 else copy.leases:
        lease = s.state.leases[lease_id]
        reader = s.state.workers[lease.reader]
        if lease.told < 0:
            s.push(reader, SourceProgress(lease_id, copy.prefix, whole))
            continue
        for message in progress_of(s, copy, lease):
            s.push(reader, message)


def progress_of(s: Step, copy: Copy, lease: Lease) -> Iterator[SourceProgress]:
    """Yield what the reader of a copy without a manifest has not heard yet, in messages of bounded size."""
    whole = copy.state not in UNFINISHED
    known = known_sums(s, copy)
    end = min(copy.prefix, len(known) // SUM_BYTES)
    while True:
        first, lease.told = lease.told, max(lease.told, min(end, lease.told + MOST_CUTS))
        sums = known[SUM_BYTES * first : SUM_BYTES * lease.told]
        last = lease.told >= end
        yield SourceProgress(lease.id, lease.told, whole and last and end == copy.memory.num_segments, first, sums)
        if last:
            return


def new_copy_id(s: Step) -> CopyId:
    """Return a fresh copy id."""
    return CopyId(s.new_id("c"))


def has_orphans(s: Step, model: ModelState, key: VersionKey) -> bool:
    """Tell whether a promised reader of the version has lost its source, or waits for one, and has no other yet."""
    for group in (model.groups[name] for name in model.calling if name in model.groups):
        for current in group.open_rounds():
            if current.key is None and current is not group.open_round():  # it was promised, and waits for its turn
                if any(joined.promised == key for joined in current.joined.values()):
                    return True
            elif current.key == key and (current.awaits_silent or any(map(is_orphaned, current.joined.values()))):
                return True
    return False


def end_drain(s: Step, holder: Worker, copy: Copy) -> int | None:
    """Take note that a copy has drained; return the request that waits for it."""
    model = s.model(holder)
    request = None
    if copy is holder.staged:
        request, holder.unstage_request = holder.unstage_request, None
    elif copy is holder.copy:
        request, holder.unpublish_request = holder.unpublish_request, None
        model.drains.note(s.now - copy.draining_since_s)
    else:
        model.offloads_dropped += 1
        holder.room_bytes = None if holder.room_bytes is None else holder.room_bytes + copy.memory.total_bytes
        s.push(holder, DropOffload(copy.id, copy.memory.placement))
    return request


def settle_drains(s: Step) -> None:
    """Withdraw the draining copies that nobody can see any more and answer their `Unpublish` or `Unstage`."""
    if s.state.in_grace(s.now):
        return
    for copy_id in sorted(s.state.draining):
        copy = s.state.copies[copy_id]
        holder = s.holder(copy)
        if copy.leases or has_orphans(s, s.model(holder), copy.key) or is_kept_back(s, copy):
            continue
        request = end_drain(s, holder, copy)
        drop_copy(s, copy, "unpublished")
        if request is not None:
            s.reply(holder, request, Ok())
