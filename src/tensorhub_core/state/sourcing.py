"""Turn the server's records into candidates and lease what the schedule chooses (laws L3, L12, L14)."""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub_core.ids import CopyId, Digest, VersionKey
from tensorhub_core.schedule.speed import Speed
from tensorhub_core.state.choosing import choose_among, offered_groups
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import mark_copy
from tensorhub_core.state.leases import add_awaited, grant, new_copy_id
from tensorhub_core.state.links import crosses
from tensorhub_core.state.manifests import content_of, copies_of, may_be_followed, may_be_partial, sources_of
from tensorhub_core.state.reaching import holds, out_of_reach, reads_in_vain
from tensorhub_core.state.records import UNFINISHED, Copy, CopyState, Group, ModelState, Registration, Round, Worker
from tensorhub_core.state.seeds import awaited_seed

_MOST_NAMED = 8
"""Versions, and holders of each, that a text names."""


def choose_copies(s: Step, reader: Worker, current: Round, promised: bool) -> list[Copy]:
    """Choose the copies a shard reads the round's version from; empty if there are none.

    Several of the reader's own layout hold the same bytes, each of them all; those of another layout are the shards of
    one replica. Sources that failed the shard are left out, unless they were only slow and there is no other; so are
    those that get nothing themselves before somebody begins who is late. Those out of its reach come last of all.
    """
    if current.key is None or reader.memory is None:
        return []
    avoid = current.avoid.get(reader.shard, {})
    tries: list[tuple[set[CopyId], bool]] = [(set(), False), (set(), True)]
    if avoid:
        dead = {copy for copy, kind in avoid.items() if kind != "slow"}
        tries = [(set(avoid), False), (dead, False), (dead, True)]
    if far := out_of_reach(s, reader, current.key):
        tries = [*(({*left_out, *far}, patient) for left_out, patient in tries), *tries]
    for left_out, patient in tries:
        copies = choose_among(s, reader, current.key, promised, left_out, patient)
        if copies:
            return [] if holds(s, s.group(reader), reader, current, copies) else copies
    return []


def lease_shard(s: Step, group: Group, shard: int, current: Round, promised: bool) -> bool:
    """Lease sources to one shard of a promised round; False if there are none, or it waits for a seed of its zone."""
    reader = s.worker_at(group, shard)
    if reader is None:
        return False
    copies = choose_copies(s, reader, current, promised)
    seed = awaited_seed(s, reader, current, copies)
    if seed is not None:
        joined = current.joined.get(shard)
        if seed.leases and joined is not None and joined.orphaned_since_s is not None:
            joined.orphaned_since_s = s.now  # it ends with what it waits for
        copies = []
    if not copies:
        s.model(reader).index.orphans.add(reader.id)
    current.leases[shard] = [grant(s, group, shard, current.number, copy).id for copy in copies]
    if (unfinished := reader.unfinished()) is not None:
        note_sources(s, reader, unfinished, copies)
        mark_copy(s, reader, unfinished)
        unfinished.speed, unfinished.advanced_s = Speed(), s.now
    return bool(copies)


def note_sources(s: Step, reader: Worker, copy: Copy, sources: Sequence[Copy]) -> None:
    """Note how the bytes of an unfinished copy come to it, when it has got its sources."""
    copy.depth, copy.route = depth_below(sources) if sources else 0, ("", "")
    if sources:
        here, there, above = reader.seat.place, s.holder(sources[0]).seat.place, sources[0]
        followed = above.state in UNFINISHED and not crosses(there, here)
        copy.route = above.route if followed else (there.zone, here.zone)


def raw_sums(s: Step, current: Round, worker: Worker) -> Digest:
    """Return the sums of a shard's sources if they have the shard's own layout, else nothing."""
    copies = copies_of(s, current.leases.get(worker.shard, ()))
    if not copies or worker.memory is None:
        return Digest(b"")
    sums, layout = copies[0].sums, worker.memory.layout
    same = all([copy.sums == sums and copy.memory.layout == layout for copy in copies])
    return sums if same else Digest(b"")


def new_copy(s: Step, worker: Worker, current: Round, memory: Registration) -> Copy:
    """Return what a shard gets by a round; what is being installed is offered when it is complete."""
    assert current.key is not None
    joined = current.joined[worker.shard]
    offered = joined.offer and joined.prefix and current.kind != "install"
    sources = sources_of(s, worker)
    sums, state = raw_sums(s, current, worker), CopyState.AWAITED
    copy = Copy(new_copy_id(s), worker.id, current.key, memory, state, sums, 0, offered, started_s=s.now)
    note_sources(s, worker, copy, sources)
    copy.converted = any([source.converted for source in sources])
    copy.content = content_of(sources, memory)
    copy.partial = offered and not sums and may_be_partial(worker, memory, copy.content)
    return copy


def await_copy(s: Step, worker: Worker, current: Round) -> None:
    """Let readers queue behind a copy that its holder has yet to begin, where that is better than another queue.

    Or those who ask at the same moment would all read from the same holders: none of them is filling yet. One that
    fetches a version from another zone is waited for however small it is; one that tries what it cannot reach, never.
    """
    memory = worker.staging if current.kind == "stage" else worker.memory
    if memory is None or current.kind == "install" or worker.unfinished() is not None:
        return
    if reads_in_vain(s, worker):
        return
    copy = new_copy(s, worker, current, memory)
    large = memory.total_bytes >= s.state.config.worth_waiting_bytes
    if may_be_followed(copy) and (large or any(s.state.leases[lease].crosses for lease in worker.leases)):
        add_awaited(s, worker, copy)


def depth_below(copies: Sequence[Copy]) -> int:
    """Return the depth of a copy that reads from these."""
    return max([c.depth + 1 if c.state in UNFINISHED else 0 for c in copies], default=0)


def describe_holders(s: Step, model: ModelState, key: VersionKey) -> str:
    """Say who holds what, for the texts of `VersionUnavailable` and `DeadlineExceeded`."""
    whole = sorted(o[0].replica for o in offered_groups(s, model, key, promised=False))
    leaving = sorted({o[0].replica for o in offered_groups(s, model, key, promised=True)}.difference(whole))
    awake = {*whole, *leaving}
    silent = sorted({o[0].replica for o in offered_groups(s, model, key, promised=True, silent=True)}.difference(awake))
    parts = (
        ("held by", whole),
        ("being withdrawn by", leaving),
        ("held at workers that are silent at the moment:", silent),
    )
    if whole or leaving or silent:
        return "; ".join(f"{how} {', '.join(names[:_MOST_NAMED])}" for how, names in parts if names)
    held: dict[str, list[str]] = {}
    for (_, number), replicas in model.finished.items():
        names = held.setdefault(str(number), [])
        for replica in replicas:
            if len(names) >= _MOST_NAMED:  # there may be thousands, and as many who ask
                break
            names += [f"{replica}/{w.shard}" for w in s.members(model.groups[replica]) if has_all_of(w, number)]
    rows = "; ".join(f"version {v} at {', '.join(h[:_MOST_NAMED])}" for v, h in sorted(held.items())[:_MOST_NAMED])
    return f"held now: {rows}" if rows else "nobody holds any version now"


def has_all_of(worker: Worker, number: int) -> bool:
    """Tell whether a worker has a finished copy of a version of this number."""
    return any(copy.key[1] == number and copy.state not in UNFINISHED for copy in worker.copies())
