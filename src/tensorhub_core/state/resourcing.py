"""Give a promised shard other sources: at once, or when a worker that is silent at the moment is heard again (law L4).

A silent worker may only be paused, or cut off from this server: it gets no new reader, but what it holds is not lost
before it is buried. So a shard that has no other source waits for either.
"""

from __future__ import annotations

from tensorhub_core.ids import CopyId
from tensorhub_core.state.blobs import enclose
from tensorhub_core.state.choosing import choose_by_scan
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import mark_copy
from tensorhub_core.state.leases import revoke_lease, source_of
from tensorhub_core.state.manifests import (
    content_of,
    may_be_followed,
    may_be_partial,
    set_known,
    sources_of,
    still_stands,
)
from tensorhub_core.state.messages import Discard, Promise
from tensorhub_core.state.records import Group, Round, Worker
from tensorhub_core.state.seeds import awaited_seed
from tensorhub_core.state.sourcing import await_copy, choose_copies, raw_sums


def forgive(s: Step, holder: Worker) -> None:
    """Let readers come back to a worker that was silent when they left it: it was paused. Wrong bytes are no pause."""
    ours, model = [copy.id for copy in holder.copies()], s.model(holder)
    for group in [model.groups[name] for name in model.calling if name in model.groups] if ours else ():
        current = group.open_round()
        for avoid in () if current is None else current.avoid.values():
            for copy_id in ours:
                if avoid.get(copy_id, "corrupt") != "corrupt":
                    del avoid[copy_id]


def pardon(s: Step, current: Round, shard: int) -> bool:
    """Let a shard come back, once, to copies that stalled if their workers were heard since; tell if there are any."""
    avoid = current.avoid.get(shard, {})
    pardoned = [
        c
        for c in avoid
        if (since := _first_stall(s, current, shard, c)) and s.holder(s.state.copies[c]).last_seen_s > since
    ]
    for copy_id in pardoned:
        del avoid[copy_id]
    return bool(pardoned)


def _first_stall(s: Step, current: Round, shard: int, copy_id: CopyId) -> float | None:
    """Return when a copy that is there failed a shard if all it did was to stall, once."""
    times = current.stalls.get((shard, copy_id), [])
    only = copy_id in s.state.copies and current.avoid.get(shard, {}).get(copy_id) == "stalled" and len(times) == 1
    return times[0] if only else None


def may_wake(s: Step, group: Group, reader: Worker, current: Round, promised: bool) -> bool:
    """Tell whether a shard without a source would have one if those who are silent at the moment were heard again.

    The holder of a copy that stalled may have been paused a moment ago: it is heard again soon, or suspected. So is
    one that waits for a seed of its zone.
    """
    if current.key is None or reader.memory is None:
        return False
    if awaited_seed(s, reader, current, choose_copies(s, reader, current, promised)) is not None:
        return True
    failed = set()
    for copy_id, kind in current.avoid.get(reader.shard, {}).items():
        copy = s.state.copies.get(copy_id)
        silent = copy is not None and s.holder(copy).suspected and kind != "corrupt"
        if not silent and _first_stall(s, current, reader.shard, copy_id) is None:
            failed.add(copy_id)
    return bool(choose_by_scan(s, reader, current.key, promised, failed, patient=True, silent=True))


def tell_sources(s: Step, worker: Worker, current: Round) -> None:
    """Answer a promised shard that asked for other sources, or whose bytes do not count, with those it was leased."""
    joined = current.joined[worker.shard]
    request, joined.source_request = joined.source_request, None
    joined.orphaned_since_s = None
    if request is None:
        return
    assert current.key is not None
    refresh_sums(s, current, worker)
    s.model(worker).index.orphans.discard(worker.id)
    if any(s.state.leases[lease].crosses for lease in worker.leases):
        s.touched.add(worker.model)  # others who have lost their sources as well have waited for it
    sources = tuple(source_of(s, lease) for lease in current.leases.get(worker.shard, []))
    blobs = enclose(s, worker, sources)
    if joined.rereads:
        s.reply(worker, request, Discard(current.number, sources, blobs))
    else:
        s.reply(worker, request, Promise(current.number, *current.key, sources, blobs))


def refresh_sums(s: Step, current: Round, worker: Worker) -> None:
    """Let a filling copy be verified against its new sources; what it has verified is offered only if it counts there.

    Who follows it and has got nothing yet stays, if there is to be more.
    """
    copy = worker.unfinished()
    if copy is None:
        return await_copy(s, worker, current)
    if current.kind == "install":
        return
    sources = sources_of(s, worker)
    sums, content = raw_sums(s, current, worker), content_of(sources, copy.memory)
    stands = still_stands(s, copy, sources, sums, content)
    untouched = not (copy.sums or copy.prefix)
    if not (content and content == copy.content):
        copy.partial = copy.offered and not sums and may_be_partial(worker, copy.memory, content)
    copy.sums, copy.content = sums, content
    mark_copy(s, worker, copy)
    if not stands or sums:
        set_known(s, copy, b"")
    if not stands:
        copy.prefix = 0
    if not may_be_followed(copy) or not (stands or untouched):
        for lease_id in sorted(copy.leases):
            revoke_lease(s, lease_id, "the source itself reads from elsewhere now")
