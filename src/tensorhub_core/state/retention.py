"""Retention: no call of a client loses one of the newest versions (law L11).

When the first shard of a replica takes a retained version back, it is decided once for the replica: it lets go if
another reliable replica keeps the version, else it has *custody*: no shard's `Unpublish` is answered before that shard
has made an offload copy in host memory, or another reliable replica holds the version, or it is not retained any more.
"""

from __future__ import annotations

from dataclasses import replace

from tensorhub_core.errors import CorruptTransfer, StateError, TensorHubError, error_from_wire
from tensorhub_core.ids import CopyId, Digest, ReplicaName, VersionKey
from tensorhub_core.state.candidates import leads_to
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import mark_copy
from tensorhub_core.state.keeping import (
    is_free,
    is_kept_back,
    is_protected,
    is_reliable,
    is_retained,
    is_withdrawing,
    review,
    withdraws,
)
from tensorhub_core.state.leases import add_offload, drop_copy, new_copy_id
from tensorhub_core.state.leaving import after_failure, answer_handovers, lose, reconsider
from tensorhub_core.state.messages import (
    DropOffload,
    Failure,
    Hello,
    Offload,
    Offloaded,
    OffloadFailed,
    OffloadKept,
    Ok,
)
from tensorhub_core.state.records import (
    Copy,
    CopyState,
    Group,
    ModelState,
    Registration,
    Round,
    VersionRecord,
    Worker,
)
from tensorhub_core.state.versions import bind_manifest, note_whole, show

_GONE = "its holder does not have it any more"


def settle(s: Step) -> None:
    """Decide who keeps what, where anything has changed; in the grace after a restart nothing is decided (law L5)."""
    changed, s.changed = sorted(s.changed), set()
    for name, replica, key in changed:
        review(s, name, replica, key)
    models = s.kept.union(name for name, _, _ in changed)
    s.kept = set()
    if s.state.in_grace(s.now):
        return
    for name in sorted(models):
        model = s.state.models[name]
        if model.retain:
            release(s, model)
            for _, replica, key in (triple for triple in changed if triple[0] == name):
                take_verdict(s, model, replica, key)
            for key in custodies(model):
                attend(s, model, key, model.versions[key])
        drop_needless(s, model)
        answer_handovers(s, model)


def is_at_work(model: ModelState) -> bool:
    """Tell whether somebody keeps a version, or wants to leave, and waits for what others do."""
    return bool(model.handovers) or bool(custodies(model))


def custodies(model: ModelState) -> list[VersionKey]:
    """Return the versions that somebody has to keep."""
    return [key for key, record in model.versions.items() if record.keeping.custody]


def after_grace(s: Step) -> None:
    """Decide what the grace has put off."""
    s.kept.update(s.state.models)
    for copy_id in s.state.draining:
        copy = s.state.copies[copy_id]
        s.note(s.holder(copy), copy.key)


# --- which versions are retained ------------------------------------------------------------------------------------


def release(s: Step, model: ModelState) -> None:
    """Release the versions of which enough newer ones are safe, for good."""
    records = model.versions.values()
    for record in records:
        if record.keeping.released or model.high is None or record.key >= model.high:
            continue
        newer = (other for other in records if other.was_whole and other.key > record.key)
        if sum(replaces(other, record) for other in newer) >= model.retain:
            record.keeping.released = True
            s.touched.add(model.name)


def replaces(newer: VersionRecord, old: VersionRecord) -> bool:
    """Tell whether a newer version is as safe as an old one, so that the old one need not be kept for its sake.

    It is secured, or whole wherever the old one is held, so that what would lose it would lose the old one as well.
    Spot replicas count only where there are no others.
    """
    if newer.keeping.secured_by is not None:
        return True
    whole, firm = newer.keeping.whole, old.keeping.firm
    return bool(whole) and firm <= whole and (bool(firm) or old.keeping.held <= whole)


# --- custody --------------------------------------------------------------------------------------------------------


def take_verdict(s: Step, model: ModelState, replica: ReplicaName, key: VersionKey) -> None:
    """Decide once for a replica that withdraws a version whether it has to keep it (law L1)."""
    record, group = model.versions.get(key), model.groups.get(replica)
    if record is None or group is None or not is_withdrawing(s, group, key):
        return
    keeping = record.keeping
    if replica in keeping.custody or replica in keeping.let_go:
        return
    if is_free(s, model, group, record):
        return let_go(s, model, group, record)
    keeping.custody.add(replica)
    if (text := cannot_keep(s, group, key)) is not None:
        give_up(s, model, group, record, text)


def cannot_keep(s: Step, group: Group, key: VersionKey) -> str | None:
    """Return why a replica could not keep a version, whatever it makes.

    A shard that still waits for others to take over stays as long as that: what the rest keeps until then can be read.
    """
    leaving = [w.shard for w in s.members(group) if w.leaving and (w.handover_request is None or withdraws(w, key))]
    return f"shard {leaving[0]} is about to leave" if leaving else None


def attend(s: Step, model: ModelState, key: VersionKey, record: VersionRecord) -> None:
    """See to it that the replicas which have to keep a version get on with it, or need not any more."""
    for replica in sorted(record.keeping.custody):
        group = model.groups[replica]
        held = replica in record.keeping.held
        if not is_retained(model, record) or not held or is_protected(s, model, group, record):
            let_go(s, model, group, record)
        elif (text := cannot_keep(s, group, key)) is not None:
            give_up(s, model, group, record, text)
        elif not is_being_read(s, group, key):
            for worker in s.members(group):
                if withdraws(worker, key) and replica in record.keeping.custody:
                    ask(s, model, group, worker, record)


def is_being_read(s: Step, group: Group, key: VersionKey) -> bool:
    """Tell whether a reliable replica reads the version from this one: soon it holds it, and no offload copy is needed.

    The drain waits for its leases in any case, which live until it has committed; if the read breaks, it is time then.
    """
    for copy in (copy for w in s.members(group) for copy in w.copies() if copy.key == key):
        for lease in (s.state.leases[lease_id] for lease_id in copy.leases):
            reader = s.group(s.state.workers[lease.reader])
            current = reader.rounds.get(lease.round)
            if reader is not group and current is not None and will_hold(s, reader, current):
                return True
    return False


def will_hold(s: Step, reader: Group, current: Round) -> bool:
    """Tell whether a replica can be relied on once its round has committed."""
    return current.kind == "fill" and all(j.offer for j in current.joined.values()) and is_reliable(s, reader)


def ask(s: Step, model: ModelState, group: Group, worker: Worker, record: VersionRecord) -> None:
    """Have a shard make its offload copy; one that cannot is refused unless another replica will hold the version."""
    copy = worker.copy
    assert copy is not None
    if worker.offload_failed is not None:
        if not is_hope(s, model, group, record.key):
            refuse(s, model, group, worker, record)
        return
    short = worker.room_bytes is not None and worker.room_bytes < copy.memory.total_bytes
    if short and any(other.state is CopyState.DRAINING for other in worker.offloads):
        return  # there will be room when that one has drained
    if worker.offload_asked != copy.id:
        worker.offload_asked = copy.id
        s.push(worker, Offload(copy.id, *copy.key))


def is_hope(s: Step, model: ModelState, group: Group, key: VersionKey) -> bool:
    """Tell whether another reliable replica is about to hold this version or a newer one, and does not wait for us."""
    ours = list(group.members.values())
    for other in model.groups.values():
        current = other.open_round()
        if other is group or current is None or current.key is None or current.key < key:
            continue
        if not will_hold(s, other, current) or not model.stuck.isdisjoint(other.members.values()):
            continue
        sources = [s.state.copies[s.state.leases[i].copy] for w in s.members(other) for i in w.leases]
        if sources and not any(leads_to(s, source, worker) for source in sources for worker in ours):
            return True
    return False


def refuse(s: Step, model: ModelState, group: Group, worker: Worker, record: VersionRecord) -> None:
    """Refuse to withdraw the copy of a worker that cannot keep the version otherwise: it is offered again.

    A spot worker is never held back: it may vanish at any time anyway, and what it cannot keep is lost likewise.
    """
    failed, copy = worker.offload_failed, worker.copy
    assert isinstance(failed, Failure)
    assert copy is not None
    if group.spot:
        return give_up(s, model, group, record, f"no room for an offload copy: {failed.message}")
    copy.state = CopyState.PUBLISHED
    mark_copy(s, worker, copy)
    s.state.draining.discard(copy.id)
    forget_task(s, model, worker)
    request, worker.unpublish_request = worker.unpublish_request, None
    if request is not None:
        s.reply(worker, request, failed)
    s.note(worker, copy.key)
    s.touched.add(model.name)


def let_go(s: Step, model: ModelState, group: Group, record: VersionRecord) -> None:
    """Let a replica withdraw a version; offload copies that are being made are not needed any more."""
    if group.replica in record.keeping.custody:
        record.keeping.custody.discard(group.replica)
        s.touched.add(model.name)  # who waits for it to be offered again
    if is_withdrawing(s, group, record.key):
        record.keeping.let_go.add(group.replica)
    for worker in s.members(group):
        if worker.copy is not None and worker.copy.key == record.key:
            if worker.offload_asked == worker.copy.id:
                s.push(worker, DropOffload(worker.copy.id))
            forget_task(s, model, worker)


def give_up(s: Step, model: ModelState, group: Group, record: VersionRecord, reason: str) -> None:
    """Let a replica withdraw a version although nobody else keeps it: that counts as a failure."""
    let_go(s, model, group, record)
    lose(s, model, record, group.replica, reason)
    reconsider(s, model, record, group.replica)


def forget_task(s: Step, model: ModelState, worker: Worker) -> None:
    """Forget that a worker should make an offload copy."""
    worker.offload_asked = worker.offload_failed = None
    model.stuck.discard(worker.id)


# --- offload copies -------------------------------------------------------------------------------------------------


def offloaded(s: Step, worker: Worker, request: int, m: Offloaded) -> None:
    """Take an offload copy in; it serves at once."""
    original, placement = worker.copy, Digest(m.placement)
    # By its placement too: a hello after a lost connection or a restart may have brought it before this.
    said = None if original is None or original.id != m.copy else original.key
    known = next((c for c in worker.offloads if is_known_as(c, m.copy, placement, said)), None)
    if known is not None:
        return s.reply(worker, request, OffloadKept(known.id))
    if original is None or original.id != m.copy or not is_kept_back(s, original):
        return s.fail(worker, request, StateError("the offload copy is not needed any more: free it"))
    if placement not in s.state.blobs:
        return s.fail(worker, request, StateError("the placement blob was not uploaded before the offload copy"))
    memory = replace(original.memory, placement=placement)
    copy = put_offload(s, worker, original.key, memory, original.sums, original.id)
    copy.converted = original.converted
    forget_task(s, s.model(worker), worker)
    s.model(worker).offloads_made += 1
    if worker.room_bytes is not None:
        worker.room_bytes -= memory.total_bytes
    s.reply(worker, request, OffloadKept(copy.id))


def is_known_as(copy: Copy, origin: CopyId | str, placement: Digest, key: VersionKey | None) -> bool:
    """Tell whether this is the offload copy that a worker speaks of; `key` is its version if that is known."""
    return copy.origin == origin or (copy.memory.placement == placement and key in (None, copy.key))


def put_offload(
    s: Step, worker: Worker, key: VersionKey, memory: Registration, sums: Digest, origin: CopyId | None
) -> Copy:
    """Add an offload copy, which is whole from the start."""
    segments, size = memory.num_segments, memory.total_bytes
    state = CopyState.PUBLISHED
    copy = Copy(new_copy_id(s), worker.id, key, memory, state, sums, segments, True, 0, size, origin=origin)
    add_offload(s, worker, copy)
    note_whole(s, s.group(worker), key)
    s.touched.add(worker.model)
    return copy


def offload_failed(s: Step, worker: Worker, request: int, m: OffloadFailed) -> None:
    """Take note that a worker cannot keep the version; its `Unpublish` is refused if nobody else will."""
    s.reply(worker, request, Ok())
    if worker.copy is None or worker.copy.id != m.copy or not is_kept_back(s, worker.copy):
        return
    error: TensorHubError = error_from_wire(m.code, m.message)
    if isinstance(error, CorruptTransfer):
        # Its memory does not hold the version any more: there is nothing to be kept, and no call to be held back.
        model = s.model(worker)
        return give_up(s, model, s.group(worker), model.versions[worker.copy.key], m.message)
    worker.offload_failed, worker.offload_asked = Failure(error.code, m.message), None
    s.model(worker).stuck.add(worker.id)
    s.kept.add(worker.model)


def take_back(s: Step, worker: Worker, m: Hello) -> None:
    """Take back the offload copies that a worker says it has, and forget those that it does not have any more."""
    said = {(held.epoch, held.number): held for held in m.offloads}
    for copy in list(worker.offloads):
        here = said.get(copy.key)
        if here is not None and here.placement == copy.memory.placement:
            del said[copy.key]
        else:
            drop_copy(s, copy, _GONE)
            after_failure(s, worker.model, worker.replica, {copy.key}, _GONE)
    for key, held in said.items():
        layout, sums = Digest(held.layout), Digest(held.sums)
        record = s.model(worker).versions.get(key)
        if record is not None and record.manifests.get(layout, sums) != sums:
            text = f"{worker.replica}/{worker.shard} has offloaded other bytes of version {show(key)}: not offered"
            s.log("warning", text)
            continue
        memory = Registration(layout, Digest(held.placement), held.total_bytes, held.num_segments, held.portable)
        bind_manifest(s, worker, key, layout, sums, held.total_bytes)
        put_offload(s, worker, key, memory, sums, None).converted = held.converted


def drop_needless(s: Step, model: ModelState) -> None:
    """Withdraw offload copies that keep nothing any more; one that is needed again meanwhile goes on serving."""
    for copy_id in sorted(s.state.offloads):
        copy = s.state.copies[copy_id]
        worker = s.holder(copy)
        if worker.model != model.name or (needed := is_needed(s, model, copy)) == (copy.state is CopyState.PUBLISHED):
            continue
        copy.state = CopyState.PUBLISHED if needed else CopyState.DRAINING
        mark_copy(s, worker, copy)
        (s.state.draining.discard if needed else s.state.draining.add)(copy.id)
        review(s, model.name, worker.replica, copy.key)
        s.touched.add(model.name)


def is_needed(s: Step, model: ModelState, copy: Copy) -> bool:
    """Tell whether an offload copy keeps a retained version that its replica does not hold otherwise."""
    group = s.group(s.holder(copy))
    record = model.versions[copy.key]
    if model.retain == 0 or record.keeping.released or is_protected(s, model, group, record):
        return False
    registered = [w.copy for w in s.members(group) if w.copy is not None and w.copy.key == copy.key]
    return len(registered) < group.num_shards or any(c.state is not CopyState.PUBLISHED for c in registered)
