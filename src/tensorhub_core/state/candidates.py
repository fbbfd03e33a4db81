"""What the schedule has to know of copies and readers, and which copies lead nowhere or to who is late (L14)."""

from __future__ import annotations

from collections.abc import Collection

from tensorhub_core.ids import CopyId, WorkerId
from tensorhub_core.schedule.sources import Candidate, Reader
from tensorhub_core.state.context import Step
from tensorhub_core.state.links import ingress_of
from tensorhub_core.state.manifests import sources_of
from tensorhub_core.state.records import UNFINISHED, Copy, CopyState, ModelState, Worker
from tensorhub_core.state.seeds import SETTLING


def candidate_of(s: Step, copy: Copy, leaving: bool = False) -> Candidate:
    """Describe a copy to the schedule; `leaving`: some shard of its replica is being withdrawn."""
    holder, unfinished = s.holder(copy), copy.state in UNFINISHED
    return Candidate(
        copy.id,
        holder.replica,
        copy.memory.layout,
        holder.seat.place,
        len(copy.leases),
        copy.sums,
        depth=copy.depth + 1 if unfinished else 0,
        draining=leaving,
        converted=copy.converted,
        egress=s.state.flows.egress.get(holder.seat.nic, 0),
    )


def reader_of(s: Step, worker: Worker) -> Reader:
    """Describe a reader to the schedule."""
    assert worker.memory is not None
    policy = s.state.config.policy
    lag = policy.lag(worker.memory.total_bytes) if policy.lag_bytes else 0.0
    return Reader(worker.seat.place, ingress_of(s, worker), lag, policy.beside)


def may_be_read(s: Step, copy: Copy, reader: Worker, *, tangled: bool, patient: bool) -> bool:
    """Tell whether a reader may be sent to a copy that is offered.

    `tangled`: it has to be looked at what that follows; `patient`: the reader waits also for those who are late.
    """
    if copy.state not in UNFINISHED:
        return True
    if not (copy.sums or reader.announces_sums) or (not patient and is_late(s, copy)):
        return False
    if not s.holder(copy).leases and not is_done(s, copy):
        return False
    return not (tangled and (leads_to(s, copy, reader.id) or (not patient and is_behind_late(s, copy))))


def is_tangled(s: Step, model: ModelState, reader: Worker) -> bool:
    """Tell whether a copy may lead back to this reader, to nowhere, or to somebody who is late: mostly none does."""
    own, index = reader.unfinished(), model.index
    if index.broken:
        index.broken.intersection_update([name for name in index.broken if is_broken(s, name)])
    return bool(index.late or index.broken or (own is not None and own.leases))


def is_broken(s: Step, name: CopyId) -> bool:
    """Tell whether an unfinished copy is followed although it has no source at the moment."""
    copy = s.state.copies.get(name)
    if copy is None or copy.state not in UNFINISHED or not copy.leases or s.holder(copy).leases:
        return False
    return not is_done(s, copy)


def is_done(s: Step, copy: Copy) -> bool:
    """Tell whether the holder of an unfinished copy has all of it, and was told that it counts (law L4).

    One that has read all, but has lost its leases before it could ask, will read again, and so will who follows it.
    """
    holder = s.holder(copy)
    current = s.group(holder).open_round()
    joined = None if current is None else current.joined.get(holder.shard)
    return joined is not None and joined.done_request is not None


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
        if not follows and not is_done(s, here):
            return True
        ahead += follows
    return False


def is_late(s: Step, copy: Copy) -> bool:
    """Tell whether the holder of a promised copy has put off filling it for so long that nobody should wait for it.

    Or it comes from another zone far more slowly than it could. Or its holder, of one that has no manifest yet, has not
    come on with it although its sources would let it: to reshard takes more than to copy, and in other places.
    """
    if copy.state is CopyState.AWAITED:
        return s.now - copy.started_s >= s.state.config.begin_within_s
    if copy.id in s.model(s.holder(copy)).index.slow:
        return True
    left = copy.memory.num_segments - copy.prefix
    if copy.state is not CopyState.FILLING or copy.sums or not left:
        return False
    ahead = [source for source in sources_of(s, s.holder(copy)) if source.state in UNFINISHED]
    if any(source.prefix <= copy.prefix for source in ahead):
        return False
    since_s = max([copy.advanced_s, *(source.advanced_s for source in ahead)])
    return s.now - since_s >= s.state.config.advance_within_s * (1 if left > 1 else SETTLING)


def is_behind_late(s: Step, copy: Copy) -> bool:
    """Tell whether a copy follows one whose holder is late, directly or through others."""
    ahead, seen = [copy.id], set()
    while ahead:
        here = s.state.copies.get(ahead.pop())
        if here is None or here.id in seen or here.state not in UNFINISHED:
            continue
        seen.add(here.id)
        if is_late(s, here):
            return True
        ahead += [s.state.leases[lease].copy for lease in s.holder(here).leases]
    return False


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
