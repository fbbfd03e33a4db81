"""Turn the server's records into candidates and lease what the schedule chooses (laws L3, L12, L14)."""

from __future__ import annotations

from collections.abc import Collection

from tensorhub_core.ids import CopyId, Digest, VersionKey, WorkerId
from tensorhub_core.schedule.sources import Candidate, Place, choose_more, choose_raw, choose_replica
from tensorhub_core.schedule.speed import Speed
from tensorhub_core.state.context import Step
from tensorhub_core.state.leases import add_awaited, grant, new_copy_id
from tensorhub_core.state.manifests import content_of, may_be_followed, may_be_partial, sources_of
from tensorhub_core.state.reaching import holds, out_of_reach
from tensorhub_core.state.records import UNFINISHED, Copy, CopyState, Group, ModelState, Registration, Round, Worker

_SETTLING = 6
"""How many times as long the last segment may take, which comes when the whole memory was summed."""


def place_of(group: Group) -> Place:
    """Return where a replica runs."""
    return Place(group.zone, group.host)


def candidate_of(s: Step, copy: Copy) -> Candidate:
    """Describe a copy to the schedule."""
    group = s.group(s.holder(copy))
    draining = copy.state is CopyState.DRAINING
    return Candidate(
        copy.id,
        group.replica,
        copy.memory.layout,
        place_of(group),
        len(copy.leases),
        copy.sums,
        depth=depth_below([copy]),
        draining=draining,
        converted=copy.converted,
    )


def leads_to(s: Step, copy: Copy, reader: WorkerId) -> bool:
    """Tell whether following a copy's sources leads back to the reader, or to nowhere (law L14)."""
    ahead, seen = [copy.id], set()
    while ahead:
        here = s.state.copies.get(ahead.pop())
        if here is None or here.worker == reader:
            return True
        if here.id in seen or here.state not in UNFINISHED:
            continue
        seen.add(here.id)
        follows = [s.state.leases[lease].copy for lease in s.state.workers[here.worker].leases]
        if not follows and here.prefix < here.memory.num_segments:
            return True
        ahead += follows
    return False


def offered_groups(
    s: Step, model: ModelState, key: VersionKey, promised: bool, silent: bool = False
) -> list[tuple[Group, list[Copy]]]:
    """Return the replicas all of whose shards hold the version, also staged; draining ones only for promised rounds.

    With `silent` also those with workers that are silent at the moment.
    """
    allowed = {CopyState.PUBLISHED} | ({CopyState.DRAINING} if promised else set())
    found = []
    for replica in model.holders.get(key, ()):
        group = model.groups[replica]
        workers = s.members(group)
        copies = [copy for w in workers if (copy := w.copy_of(key, allowed)) is not None]
        if len(copies) == group.num_shards and (silent or not any(w.suspected for w in workers)):
            found.append((group, copies))
    return found


def filling_copies(s: Step, model: ModelState, key: VersionKey, reader: Worker) -> list[Copy]:
    """Return the unfinished copies that others may follow."""
    found = []
    for replica in model.holders.get(key, ()):
        if replica == reader.replica:
            continue
        for worker in s.members(model.groups[replica]):
            copy = worker.unfinished()
            if copy is None or copy.key != key or worker.suspected or not may_be_followed(copy):
                continue
            if copy.sums or reader.announces_sums:
                found.append(copy)
    return found


def is_late(s: Step, copy: Copy) -> bool:
    """Tell whether the holder of a promised copy has put off filling it for so long that nobody should wait for it.

    Or, of one that has no manifest yet, has not come on with it although its sources would let it: to reshard takes
    more than to copy, and in other places.
    """
    if copy.state is CopyState.AWAITED:
        return s.now - copy.started_s >= s.state.config.begin_within_s
    left = copy.memory.num_segments - copy.prefix
    if copy.state is not CopyState.FILLING or copy.sums or not left:
        return False
    ahead = [source for source in sources_of(s, s.holder(copy)) if source.state in UNFINISHED]
    if any(source.prefix <= copy.prefix for source in ahead):
        return False
    since_s = max([copy.advanced_s, *(source.advanced_s for source in ahead)])
    return s.now - since_s >= s.state.config.advance_within_s * (1 if left > 1 else _SETTLING)


def held_up(s: Step, copies: Collection[Copy]) -> set[CopyId]:
    """Return the late ones of some copies of a version, and the unfinished ones that follow them."""
    ahead = [copy for copy in copies if is_late(s, copy)]
    found = {copy.id for copy in ahead}
    while ahead:
        copy = ahead.pop()
        for lease_id in copy.leases:
            follower = s.state.workers[s.state.leases[lease_id].reader].unfinished()
            if follower is not None and follower.key == copy.key and follower.id not in found:
                found.add(follower.id)
                ahead.append(follower)
    return found


def choose_copies(s: Step, group: Group, reader: Worker, current: Round, promised: bool) -> list[Copy]:
    """Choose the copies a shard reads the round's version from; empty if there are none.

    Several of the reader's own layout hold the same bytes, each of them all; those of another layout are the shards of
    one replica. Sources that failed the shard are left out, unless they were only slow and there is no other; so are
    those that get nothing themselves before somebody begins who is late. Those out of its reach come last of all.
    """
    if current.key is None or reader.memory is None:
        return []
    avoid = current.avoid.get(reader.shard, {})
    dead = {copy for copy, kind in avoid.items() if kind != "slow"}
    waits = held_up(s, filling_copies(s, s.model(reader), current.key, reader))
    tries = [{*avoid, *waits}, {*dead, *waits}, dead]
    if far := out_of_reach(s, reader, current.key):
        tries = [*({*left_out, *far} for left_out in tries), *tries]
    for left_out in dict.fromkeys(map(frozenset, tries)):
        copies = choose_among(s, group, reader, current.key, promised, left_out)
        if copies:
            return [] if holds(s, group, reader, current, copies) else copies
    return []


def choose_among(
    s: Step,
    group: Group,
    reader: Worker,
    key: VersionKey,
    promised: bool,
    left_out: Collection[CopyId],
    silent: bool = False,
) -> list[Copy]:
    """Choose the copies a shard reads a version from, but none that is left out."""
    model, memory, here = s.model(reader), reader.memory, place_of(group)
    assert memory is not None
    replicas = [(g, cs) for g, cs in offered_groups(s, model, key, promised, silent) if g.replica != reader.replica]
    raw = [c for _, copies in replicas for c in copies]
    if replicas:
        raw += filling_copies(s, model, key, reader)
    candidates = [candidate_of(s, c) for c in raw if c.memory.layout == memory.layout and c.id not in left_out]
    while (best := choose_raw(here, memory.layout, candidates)) is not None:
        if not leads_to(s, s.state.copies[best.copy], reader.id):
            return [s.state.copies[c.copy] for c in (best, *choose_more(here, best, candidates))]
        candidates.remove(best)
    if not memory.portable:
        return []
    portable = [cs for _, cs in replicas if all(c.memory.portable and c.id not in left_out for c in cs)]
    chosen = choose_replica(here, [[candidate_of(s, c) for c in cs] for cs in portable])
    return [] if chosen is None else [s.state.copies[c.copy] for c in chosen]


def lease_shard(s: Step, group: Group, shard: int, current: Round, promised: bool) -> bool:
    """Lease sources to one shard of a promised round; False if there are none."""
    reader = s.worker_at(group, shard)
    if reader is None:
        return False
    copies = choose_copies(s, group, reader, current, promised)
    current.leases[shard] = [grant(s, group, shard, current.number, copy).id for copy in copies]
    if (unfinished := reader.unfinished()) is not None:
        unfinished.depth, unfinished.speed, unfinished.advanced_s = depth_below(copies), Speed(), s.now
    return bool(copies)


def raw_sums(s: Step, current: Round, worker: Worker) -> Digest:
    """Return the sums of a shard's sources if they have the shard's own layout, else nothing."""
    leases = current.leases.get(worker.shard, [])
    copies = [s.state.copies[s.state.leases[i].copy] for i in leases if i in s.state.leases]
    sums = {copy.sums for copy in copies}
    own = worker.memory is not None and all(copy.memory.layout == worker.memory.layout for copy in copies)
    return sums.pop() if own and len(sums) == 1 else Digest(b"")


def new_copy(s: Step, worker: Worker, current: Round, memory: Registration) -> Copy:
    """Return what a shard gets by a round; what is being installed is offered when it is complete."""
    assert current.key is not None
    joined = current.joined[worker.shard]
    offered = joined.offer and joined.prefix and current.kind != "install"
    sources = sources_of(s, worker)
    depth, sums, state = depth_below(sources), raw_sums(s, current, worker), CopyState.AWAITED
    copy = Copy(new_copy_id(s), worker.id, current.key, memory, state, sums, 0, offered, depth, 0, s.now)
    copy.converted = any(source.converted for source in sources)
    copy.content = content_of(sources, memory)
    copy.partial = offered and not sums and may_be_partial(worker, memory, copy.content)
    return copy


def await_copy(s: Step, worker: Worker, current: Round) -> None:
    """Let readers queue behind a copy that its holder has yet to begin, where that is better than another queue.

    Or those who ask at the same moment would all read from the same holders: none of them is filling yet.
    """
    memory = worker.staging if current.kind == "stage" else worker.memory
    if memory is None or current.kind == "install" or worker.unfinished() is not None:
        return
    copy = new_copy(s, worker, current, memory)
    if may_be_followed(copy) and memory.total_bytes >= s.state.config.worth_waiting_bytes:
        add_awaited(s, worker, copy)


def depth_below(copies: list[Copy]) -> int:
    """Return the depth of a copy that reads from these."""
    return max((c.depth + 1 for c in copies if c.state in UNFINISHED), default=0)


def describe_holders(s: Step, model: ModelState, key: VersionKey) -> str:
    """Say who holds what, for the texts of `VersionUnavailable` and `DeadlineExceeded`."""
    whole = sorted(g.replica for g, _ in offered_groups(s, model, key, promised=False))
    leaving = sorted({g.replica for g, _ in offered_groups(s, model, key, promised=True)}.difference(whole))
    awake = {*whole, *leaving}
    silent = sorted({g.replica for g, _ in offered_groups(s, model, key, promised=True, silent=True)}.difference(awake))
    parts = (
        ("held by", whole),
        ("being withdrawn by", leaving),
        ("held at workers that are silent at the moment:", silent),
    )
    if whole or leaving or silent:
        return "; ".join(f"{how} {', '.join(names[:8])}" for how, names in parts if names)
    held: dict[str, list[str]] = {}
    for group in model.groups.values():
        for worker in s.members(group):
            for copy in worker.copies():
                if copy.state not in UNFINISHED:
                    held.setdefault(str(copy.key[1]), []).append(f"{group.replica}/{worker.shard}")
    rows = "; ".join(f"version {v} at {', '.join(h[:8])}" for v, h in sorted(held.items())[:8])
    return f"held now: {rows}" if rows else "nobody holds any version now"
