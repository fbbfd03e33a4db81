"""Reads within a promised round: filling, prefixes, other sources, done, commit (laws L4, L12, L13)."""

from __future__ import annotations

from tensorhub_core.errors import CorruptTransfer, StateError, TensorHubError, error_from_wire
from tensorhub_core.ids import CopyId, Digest, LeaseId
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import mark_copy
from tensorhub_core.state.leases import (
    add_copy,
    drop_copy,
    note_finished,
    revoke_lease,
    tell_followers,
)
from tensorhub_core.state.manifests import (
    agrees,
    announced,
    complete,
    forget_prefix,
    may_be_followed,
    may_be_partial,
    set_known,
)
from tensorhub_core.state.messages import (
    Announce,
    AskSums,
    Committed,
    Done,
    Failure,
    Filling,
    LeaveRound,
    NothingNewer,
    Ok,
    Relocate,
)
from tensorhub_core.state.reaching import in_full, note_failure, note_read
from tensorhub_core.state.records import Copy, CopyState, Group, Registration, Round, Worker
from tensorhub_core.state.resuming import ended_before, keep_end
from tensorhub_core.state.rounds import abort, drop_leases, drop_leases_of, in_words, keep_promise, leases_stand, where
from tensorhub_core.state.slow_seeds import note_rate
from tensorhub_core.state.sourcing import new_copy
from tensorhub_core.state.tickets import pass_on
from tensorhub_core.state.versions import PADDING_TOO, bind_manifest, note_offered, note_whole, show
from tensorhub_core.state.zones import note_progress


def filling(s: Step, worker: Worker, request: int, m: Filling) -> None:
    """Note that a shard begins to overwrite its memory; from now on its verified prefix may be offered.

    In a stage round that is the staging memory, and the copy beside it stays as it is. What is being installed is
    offered when it is complete; until then its staged copy serves.
    """
    current = active_round(s, worker, request, m.round)
    if current is None:
        return
    staged = current.kind == "stage"
    key = current.key
    old, memory = (worker.staged, worker.staging) if staged else (worker.copy, worker.memory)
    if old is not None and old.state is CopyState.FILLING and (old.key, old.memory) == (key, memory):
        old.converted = old.converted or m.converted
        return s.reply(worker, request, Ok())  # said again, over another connection
    if old is not None and old.state is not CopyState.HELD:
        how = "discard()" if staged else "unpublish()"
        text = f"version {show(old.key)} is {old.state.value}: {how} it before it is overwritten"
        return s.fail(worker, request, StateError(text))
    if memory is None:
        return s.fail(worker, request, StateError("the staging memory was exchanged: register it again"))
    if old is not None:
        drop_copy(s, old, "overwritten")
    assert key is not None
    worker.dirty = worker.dirty or not staged
    copy = take_awaited(s, worker, memory)
    if copy is None:
        copy = new_copy(s, worker, current, memory)
    copy.state, copy.started_s, copy.advanced_s = CopyState.FILLING, s.now, s.now
    copy.converted = copy.converted or m.converted
    copy.partial = copy.offered and not copy.sums and may_be_partial(worker, memory, ())
    add_copy(s, worker, copy, staged=staged)
    s.reply(worker, request, Ok())


def take_awaited(s: Step, worker: Worker, memory: Registration) -> Copy | None:
    """Return the copy that readers queue behind, now that its bytes are on their way into this memory."""
    copy, worker.awaited = worker.awaited, None
    if copy is None or copy.memory == memory:
        return copy
    worker.awaited = copy
    drop_copy(s, copy, "its holder fills other memory")
    return None


def announce(s: Step, worker: Worker, request: int, m: Announce) -> None:
    """Take note of a verified prefix; it counts only while the leases it was read under stand (law L12)."""
    current = active_round(s, worker, request, m.round)
    copy = worker.filling()
    if current is None:
        return
    s.reply(worker, request, Ok())
    if copy is None or not leases_stand(s, current, worker.shard):
        return
    before, copy.done_bytes = copy.done_bytes, max(0, min(m.done_bytes, copy.memory.total_bytes))
    copy.speed.note(copy.done_bytes, s.now)
    prefix = announced(s, worker, copy, min(m.prefix, copy.memory.num_segments), m.sums)
    if prefix is None:
        text = f"{worker.replica}/{worker.shard} announces other checksums than before for what it has verified"
        return abort(s, s.group(worker), current, CorruptTransfer(text))
    if copy.done_bytes > before or prefix > copy.prefix:
        copy.advanced_s = s.now
        note_progress(s, worker, copy)
    if prefix > copy.prefix:
        copy.prefix = prefix
        tell_followers(s, copy)


def ask_sums(s: Step, worker: Worker, request: int, m: AskSums) -> None:
    """Put a shard's question for checksums of cuts to the source of one of its leases."""
    current = active_round(s, worker, request, m.round)
    if current is None:
        return
    lease = s.state.leases.get(LeaseId(m.lease))
    if lease is None or (lease.reader, lease.round) != (worker.id, m.round):
        return s.fail(worker, request, StateError("the lease is over, or another worker's"))
    pass_on(s, worker, request, lease, m)


def relocate(s: Step, worker: Worker, request: int, m: Relocate) -> None:
    """Give a shard other sources of the promised version, or break the promise for all shards."""
    current = active_round(s, worker, request, m.round)
    if current is None:
        return
    if current.joined[worker.shard].source_request is not None:
        return s.fail(worker, request, StateError("the shard waits for other sources already"))
    group = s.group(worker)
    avoid = current.avoid.setdefault(worker.shard, {})
    for trouble in m.failures:
        lease = s.state.leases.get(LeaseId(trouble.lease))
        if lease is None or lease.reader != worker.id:
            continue
        avoid[lease.copy] = trouble.kind
        if trouble.kind == "stalled":
            current.stalls.setdefault((worker.shard, lease.copy), []).append(s.now)
        source = s.holder(s.state.copies[lease.copy])
        current.tried[lease.copy] = source.replica
        note_failure(s, worker, source, trouble.kind)
        detail = in_full(worker, source, trouble.kind, trouble.detail)
        current.details.pop((worker.shard, lease.copy), None)
        if detail:
            current.details[worker.shard, lease.copy] = detail
        s.log("warning", blame(s, group, worker, lease.copy, in_words(trouble.kind, detail)))
    seek_sources(s, group, worker, request, current, rereads=False)


def seek_sources(s: Step, group: Group, worker: Worker, request: int, current: Round, *, rereads: bool) -> None:
    """Lease a shard other sources, now or when some are heard again; if there are none, the promise breaks for all."""
    joined = current.joined[worker.shard]
    drop_leases_of(s, current, worker.shard)
    joined.source_request, joined.rereads = request, rereads
    keep_promise(s, group, current)


def blame(s: Step, group: Group, worker: Worker, copy_id: CopyId, how: str) -> str:
    """Say which source failed which reader."""
    copy = s.state.copies.get(copy_id)
    source = "a source that is gone" if copy is None else s.holder(copy).replica
    return f"{group.replica}/{worker.shard} leaves {source}: {how}"


def done(s: Step, worker: Worker, request: int, m: Done) -> None:
    """Ask whether the bytes count; the answer `Committed` is deferred until every shard is done (law L13)."""
    current = active_round(s, worker, request, m.round)
    if current is None:
        return
    group, copy, sums = s.group(worker), worker.filling(), Digest(m.sums)
    joined = current.joined[worker.shard]
    if copy is None or sums not in s.state.blobs:
        return s.fail(worker, request, StateError("Done needs a filled copy and its uploaded checksums"))
    if joined.done_request is not None or joined.source_request is not None:
        how = "is done already" if joined.source_request is None else "waits for other sources"
        return s.fail(worker, request, StateError(f"the shard {how}"))
    if not leases_stand(s, current, worker.shard):
        return discard(s, group, worker, request, current)
    record = s.model(worker).versions.get(copy.key)
    bound = None if record is None else record.manifests.get(copy.memory.layout)
    if bound is not None and bound != sums:
        text = f"the bytes of {group.replica}/{worker.shard} differ from the version's first manifest in this layout"
        text += f"; {PADDING_TOO}"
        if m.converted:
            text += "; they are converted: holders of the version may have published other values in another dtype"
        return abort_for(s, group, worker, request, current, CorruptTransfer(text))
    if not agrees(s, copy, sums):
        text = f"{group.replica}/{worker.shard} is done with other checksums than it announced"
        return abort_for(s, group, worker, request, current, CorruptTransfer(text))
    for lease in (s.state.leases.get(LeaseId(each)) for each in m.corrupt):
        if lease is not None and lease.reader == worker.id:
            source = s.holder(s.state.copies[lease.copy]).replica
            s.log("warning", f"{group.replica}/{worker.shard} got wrong bytes from {source}, and right ones elsewhere")
    note_read(s, worker)
    joined.done_request, joined.done_sums, joined.orphaned_since_s = request, sums, None
    copy.converted = m.converted
    mark_copy(s, worker, copy)
    if not complete(s, copy, sums):
        stop_serving(s, copy, "there is no room for its checksums")
    copy.prefix, copy.done_bytes = copy.memory.num_segments, copy.memory.total_bytes
    copy.speed.finish(copy.done_bytes, s.now)
    note_rate(s, worker, copy)
    if may_be_followed(copy):
        tell_followers(s, copy)
    over = ended_before(s, group, current)
    if all(k in over or (k in current.joined and current.joined[k].done_request is not None) for k in group.members):
        commit(s, group, current)


def discard(s: Step, group: Group, worker: Worker, request: int, current: Round) -> None:
    """Tell a reader whose leases did not stand to read again, from fresh sources."""
    copy = worker.filling()
    if copy is not None:
        forget_prefix(s, copy)
        stop_serving(s, copy, "the source reads its bytes again")
    seek_sources(s, group, worker, request, current, rereads=True)


def stop_serving(s: Step, copy: Copy, reason: str) -> None:
    """End all leases on a copy; their readers are told."""
    for lease_id in sorted(copy.leases):
        revoke_lease(s, lease_id, reason)


def abort_for(s: Step, group: Group, worker: Worker, request: int, current: Round, error: TensorHubError) -> None:
    """Refuse a shard's request and break the round for all."""
    s.fail(worker, request, error)
    abort(s, group, current, error, told=worker.shard)


def commit(s: Step, group: Group, current: Round) -> None:
    """Commit for all shards in one step."""
    assert current.key is not None
    published = all(joined.offer for joined in current.joined.values())
    for worker in [w for w in s.members(group) if w.shard in current.joined]:
        copy, joined = worker.filling(), current.joined[worker.shard]
        assert copy is not None
        assert joined.done_request is not None
        assert joined.done_sums is not None
        copy.sums, copy.partial, copy.content = joined.done_sums, False, ()
        set_known(s, copy, b"")
        copy.state = CopyState.PUBLISHED if published else CopyState.HELD
        note_finished(s, worker, copy.key)
        mark_copy(s, worker, copy)
        worker.dirty = worker.dirty and current.kind == "stage"
        if published:
            bind_manifest(s, worker, copy.key, copy.memory.layout, copy.sums, copy.memory.total_bytes)
        s.reply(worker, joined.done_request, Committed(current.number, published))
        if published:
            tell_followers(s, copy)
    drop_leases(s, current)
    del group.rounds[current.number]
    keep_end(s, group, current.number, NothingNewer(current.number, *current.key))
    if published and current.kind == "stage":
        note_offered(s, s.state.models[group.model], current.key)
    elif published:
        note_whole(s, group, current.key)
    s.touched_groups.add((group.model, group.replica))


def leave_round(s: Step, worker: Worker, request: int, m: LeaveRound) -> None:
    """Break the round for all shards: this one cannot finish it."""
    current = s.group(worker).rounds.get(m.round)
    s.reply(worker, request, Ok())
    if current is None or current.verdict is not None or worker.shard not in current.joined:
        return
    who = "" if s.group(worker).num_shards == 1 else f"shard {worker.shard} left the round: "
    text = f"{who}{m.message}{where(s, s.group(worker), current)}"
    abort(s, s.group(worker), current, error_from_wire(m.code, text), told=worker.shard)


def active_round(s: Step, worker: Worker, request: int, number: int) -> Round | None:
    """Return the worker's promised round, or refuse the request with how it ended."""
    current = s.group(worker).rounds.get(number)
    if current is None or current.key is None or worker.shard not in current.joined:
        s.fail(worker, request, StateError(f"round {number} is not open for shard {worker.shard}"))
        return None
    if current.verdict is not None:
        ended = current.verdict
        s.reply(worker, request, ended if isinstance(ended, Failure) else Failure("state_error", "the round is over"))
        return None
    return current
