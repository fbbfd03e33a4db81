"""One seed for each zone and version: who fetches it from another zone, and who waits for that.

A reader that would read across zones waits instead while somebody of its zone does so already, and will offer what the
reader can read. If a seed dies or loses its source, the one of its zone that has verified most takes its place. Nobody
waits for one that is silent, does not come on, or keeps what it gets for itself: so every wait ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tensorhub_core.ids import VersionKey
from tensorhub_core.state.calling import is_orphaned
from tensorhub_core.state.context import Step
from tensorhub_core.state.links import crosses, crossing_into
from tensorhub_core.state.records import Copy, CopyState, ModelState, Round, Worker

SETTLING = 6
"""How many times as long the last segment may take, which comes when the whole memory was summed."""


def awaited_seed(s: Step, reader: Worker, current: Round, copies: Iterable[Copy]) -> Worker | None:
    """Return the shard of its zone that a reader waits for instead of reading these copies across zones, if any."""
    key, here = current.key, reader.seat.place
    if key is None or not s.state.config.policy.one_seed:
        return None
    if not any(crosses(s.holder(copy).seat.place, here) for copy in copies):
        return None
    model = s.model(reader)
    seeds = sorted({s.state.leases[lease].reader for lease in crossing_into(model, key, here.zone)})
    for seed in (s.state.workers[name] for name in seeds):
        if will_serve(s, seed, reader, current):
            return seed
    mine = mark_of(reader, key)
    for orphan in orphans_of(s, model, key, here.zone):
        if mark_of(orphan, key) > mine and will_serve(s, orphan, reader, current):
            return orphan
    return None


def mark_of(worker: Worker, key: VersionKey) -> tuple[int, str]:
    """Return how much of a version a shard has verified; among equals the one that was there first is ahead."""
    copy = worker.unfinished()
    return (-1, "") if copy is None or copy.key != key else (copy.prefix, _before(copy.id))


def _before(name: str) -> str:
    """Turn the order of ids around."""
    return "".join(chr(0x10FFFF - ord(c)) for c in name) + "\U0010ffff"


def orphans_of(s: Step, model: ModelState, key: VersionKey, zone: str) -> Iterator[Worker]:
    """Yield the shards of a zone that have lost their sources of a version a moment ago, and have no others yet."""
    for worker in sorted(model.index.orphans):
        orphan = s.state.workers.get(worker)
        current = None if orphan is None else s.group(orphan).open_round()
        joined = None if orphan is None or current is None else current.joined.get(orphan.shard)
        if orphan is None or current is None or joined is None or joined.orphaned_since_s is None or orphan.leases:
            continue
        soon = s.now - joined.orphaned_since_s < s.state.config.begin_within_s
        if soon and is_orphaned(joined) and current.key == key and s.group(orphan).zone == zone:
            yield orphan


def forget_orphans(s: Step, model: ModelState) -> None:
    """Keep only those who have no sources yet."""
    for worker in sorted(model.index.orphans):
        orphan = s.state.workers.get(worker)
        current = None if orphan is None else s.group(orphan).open_round()
        joined = None if orphan is None or current is None else current.joined.get(orphan.shard)
        if joined is None or not is_orphaned(joined):
            model.index.orphans.discard(worker)


def will_serve(s: Step, seed: Worker, reader: Worker, current: Round) -> bool:
    """Tell whether a replica that fills will offer what a reader can read, and comes on with it."""
    group = s.group(seed)
    theirs, members = group.open_round(), s.members(group)
    if seed.replica == reader.replica or theirs is None or theirs.key != current.key or theirs.kind == "install":
        return False
    if len(members) != group.num_shards or not all(joined.offer for joined in theirs.joined.values()):
        return False
    if not (seed.shard == reader.shard and is_like(seed, reader)) and not all(fits(m, reader) for m in members):
        return False
    avoid = current.avoid.get(reader.shard, {})
    return all(comes_on(s, member, theirs, avoid) for member in members)


def is_like(seed: Worker, reader: Worker) -> bool:
    """Tell whether a reader has the layout of a seed."""
    return seed.memory is not None and reader.memory is not None and seed.memory.layout == reader.memory.layout


def fits(member: Worker, reader: Worker) -> bool:
    """Tell whether a plan leads from what a shard will hold to what a reader needs. A converted one would be none."""
    memory = reader.memory
    portable = memory is not None and memory.portable and member.memory is not None and member.memory.portable
    return portable and not member.casts


def comes_on(s: Step, member: Worker, theirs: Round, avoid: Iterable[object]) -> bool:
    """Tell whether a shard of a seed is heard, and has begun and got on with its copy in time."""
    copy, config = member.unfinished(), s.state.config
    if member.suspected:
        return False
    if copy is None or copy.key != theirs.key:
        since_s = max((s.state.leases[lease].since_s for lease in member.leases), default=None)
        return since_s is not None and s.now - since_s < config.begin_within_s
    if copy.id in avoid:
        return False
    if copy.id in s.model(member).index.slow and not copy.leases:
        return False  # of those that follow it, one that has something of it already is sent across
    if copy.state is CopyState.AWAITED:
        return s.now - copy.started_s < config.begin_within_s
    left = copy.memory.num_segments - copy.prefix
    return not left or s.now - copy.advanced_s < config.advance_within_s * (1 if left > 1 else SETTLING)
