"""Give a promised shard other sources: at once, or when a worker that is silent at the moment is heard again (law L4).

A silent worker may only be paused, or cut off from this server: it gets no new reader, but what it holds is not lost
before it is buried. So a shard that has no other source waits for either.
"""

from __future__ import annotations

from tensorhub_core.ids import CopyId
from tensorhub_core.state.context import Step
from tensorhub_core.state.leases import revoke_lease, source_of
from tensorhub_core.state.messages import Discard, Promise
from tensorhub_core.state.records import Group, Round, Worker
from tensorhub_core.state.sourcing import await_copy, choose_among, raw_sums

_QUIET_HEARTBEATS = 2
"""A worker that misses more has been paused, or its heartbeats were held up."""


def is_quiet(s: Step, worker: Worker) -> bool:
    """Tell whether a worker has missed heartbeats, though perhaps not yet for so long that it is suspected."""
    return worker.suspected or s.now - worker.last_seen_s > _QUIET_HEARTBEATS * s.state.config.heartbeat_s


def excuses(s: Step, copy_id: CopyId, kind: str) -> bool:
    """Tell whether a copy may have failed a reader only because its holder was paused; wrong bytes are no pause."""
    copy = s.state.copies.get(copy_id)
    if copy is None or kind == "corrupt":
        return False
    holder = s.holder(copy)
    return holder.suspected or (kind == "stalled" and is_quiet(s, holder))


def forgive(s: Step, holder: Worker) -> bool:
    """Let readers come back to a worker that they left while it was paused; tell whether there are any."""
    ours = [copy.id for copy in holder.copies()]
    forgiven = False
    for group in s.model(holder).groups.values() if ours else ():
        current = group.open_round()
        for avoid in () if current is None else current.avoid.values():
            for copy_id in ours:
                if copy_id in avoid and excuses(s, copy_id, avoid[copy_id]):
                    del avoid[copy_id]
                    forgiven = True
    return forgiven


def may_wake(s: Step, group: Group, reader: Worker, current: Round, promised: bool) -> bool:
    """Tell whether a shard without a source would have one if those who are silent at the moment were heard again."""
    if current.key is None or reader.memory is None:
        return False
    avoid = current.avoid.get(reader.shard, {})
    failed = {copy_id for copy_id, kind in avoid.items() if not excuses(s, copy_id, kind)}
    return bool(choose_among(s, group, reader, current.key, promised, failed, silent=True))


def tell_sources(s: Step, worker: Worker, current: Round) -> None:
    """Answer a promised shard that asked for other sources, or whose bytes do not count, with those it was leased."""
    joined = current.joined[worker.shard]
    request, joined.source_request = joined.source_request, None
    joined.orphaned_since_s = None
    if request is None:
        return
    assert current.key is not None
    refresh_sums(s, current, worker)
    sources = tuple(source_of(s, lease) for lease in current.leases.get(worker.shard, []))
    if joined.rereads:
        s.reply(worker, request, Discard(current.number, sources))
    else:
        s.reply(worker, request, Promise(current.number, *current.key, sources))


def refresh_sums(s: Step, current: Round, worker: Worker) -> None:
    """Let a filling copy be verified against its new source; a copy that reads another layout offers no prefix."""
    copy = worker.unfinished()
    if copy is None:
        return await_copy(s, worker, current)
    sums = raw_sums(s, current, worker)
    if sums != copy.sums:
        copy.sums, copy.prefix = sums, 0
        for lease_id in sorted(copy.leases):
            revoke_lease(s, lease_id, "the source itself reads another layout now")
