"""Tell readers to leave a source that is far slower than what others of the version read from, or that never begins.

A reader of several sources compares them itself. For one of a single source the server compares readers: it tells each
at most once per source and round, and at most twice in all, for a reader that stays slow is slow itself.

Who queues behind a reader that was promised the version, but does not begin to fill it, is told at most once per
source. Only one at a time is told, and only who follows that reader directly, first of all the one nearest to a whole
copy: the others of the queue follow on, or are sent to its end, so that they do not all meet at the same holder.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorhub_core.ids import CopyId, VersionKey
from tensorhub_core.schedule.speed import Speed, is_slow
from tensorhub_core.state.candidates import held_up, is_late
from tensorhub_core.state.choosing import choose_among
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import file_again
from tensorhub_core.state.messages import SourceSlow
from tensorhub_core.state.records import Copy, CopyState, ModelState, Round, Worker
from tensorhub_core.state.seeds import forget_orphans
from tensorhub_core.state.slow_seeds import slow_seeds

_MOST_TOLD = 2
_LAG_S = 1.0
_MOST_READERS = 1
"""A source with more readers has no room for one that leaves another source."""

Speeds = Mapping[tuple[str, str], Speed]


def tell_stragglers(s: Step, model: ModelState) -> None:
    """Measure the copies that fill, and tell readers of slow sources to look for others."""
    forget_orphans(s, model)
    file_again(s, model)
    model.index.late.clear()
    slow_before, model.index.slow = model.index.slow, set()
    for key in sorted(model.index.filling):
        copies = [c for name in model.holders[key] for w in s.members(model.groups[name]) for c in w.copies()]
        copies = [copy for copy in copies if copy.key == key]
        for copy in copies:
            if copy.state is CopyState.FILLING:
                copy.speed.measure(s.now)
        model.index.slow |= slow_seeds(s, copies, slow_before)
        best = best_speeds(copies)
        slow = slow_ones(copies, best)
        blamed = {source.id for copy in slow.values() if (source := only_source(s, copy)) is not None}
        for copy in slow.values():
            source = only_source(s, copy)
            if source is not None and source.id not in slow and lags(copy, source, best[copy.route]):
                tell(s, copy, source, key, blamed | slow.keys())
        tell_queued(s, key, copies)


def best_speeds(copies: list[Copy]) -> Speeds:
    """Return the best speed between each two zones: a link between zones is slower than those within one."""
    best: dict[tuple[str, str], Speed] = {}
    for copy in copies:
        best[copy.route] = max(best.get(copy.route, copy.speed), copy.speed, key=lambda speed: speed.bytes_per_s or 0.0)
    return best


def slow_ones(copies: list[Copy], best: Speeds) -> dict[CopyId, Copy]:
    """Return the copies that fill slowly, each compared with those whose bytes go between the same zones."""
    return {c.id: c for c in copies if c.state is CopyState.FILLING and is_slow(c.speed, [best[c.route]])}


def lags(copy: Copy, source: Copy, best: Speed) -> bool:
    """Tell whether its source has more for a slow reader than comes in a second at the best rate.

    Who follows a copy gets nothing while that gets nothing; its rate says so for a while after that goes on.
    """
    if source.state is not CopyState.FILLING:
        return True
    return source.done_bytes - copy.done_bytes > (best.bytes_per_s or 0.0) * _LAG_S


def tell_queued(s: Step, key: VersionKey, copies: list[Copy]) -> None:
    """Tell one reader that is ready to leave the source that it waits for in vain, if there is another."""
    model = s.model(s.holder(copies[0]))
    model.index.late.update(copy.id for copy in copies if is_late(s, copy))
    waiting = held_up(s, copies)
    for copy in sorted(copies, key=lambda copy: (copy.depth, copy.id)) if waiting else ():
        source = only_source(s, copy)
        if copy.state is not CopyState.FILLING or source is None or not is_late(s, source):
            continue
        reader = s.holder(copy)
        current = s.group(reader).open_round()
        if current is None or current.key != key or not reads_now(current, reader):
            continue
        told, avoid = current.told_late.setdefault(reader.shard, set()), current.avoid.get(reader.shard, {})
        if source.id in told or not choose_among(s, reader, key, True, {*avoid, *waiting}):
            continue
        told.add(source.id)
        whose = s.holder(source).replica
        text = f"{whose} has not begun to fill it for {s.now - source.started_s:.1f} s"
        if source.id in model.index.slow:
            text = f"{whose} gets {source.speed.bytes_per_s or 0.0:,.0f} bytes/s of it, far less than the link gives"
        elif source.state is CopyState.FILLING:
            text = f"{whose} has not come on with it for {s.now - source.advanced_s:.1f} s"
        s.log("info", f"{reader.replica}/{reader.shard} is sent to another source of version {key[1]}: {text}")
        return s.push(reader, SourceSlow(current.number, next(iter(reader.leases)), text))


def only_source(s: Step, copy: Copy) -> Copy | None:
    """Return the source of a copy that has a single one."""
    leases = s.holder(copy).leases
    return s.state.copies[s.state.leases[next(iter(leases))].copy] if len(leases) == 1 else None


def tell(s: Step, copy: Copy, source: Copy, key: VersionKey, slow: set[CopyId]) -> None:
    """Tell a slow reader to leave its source, unless there is nothing better or it was told before."""
    reader = s.holder(copy)
    current = s.group(reader).open_round()
    if current is None or current.key != key or not reads_now(current, reader):
        return
    told = current.told_slow.setdefault(reader.shard, set())
    avoid = current.avoid.get(reader.shard, {})
    if source.id in told or source.id in avoid or len(told) >= _MOST_TOLD:
        return
    better = choose_among(s, reader, key, True, {*avoid, *slow, source.id})
    if not better or any(len(other.leases) > _MOST_READERS for other in better):
        return
    told.add(source.id)
    rate = copy.speed.bytes_per_s or 0.0
    text = f"{rate:,.0f} bytes/s, far less than others of this version get"
    s.log("warning", f"{reader.replica}/{reader.shard} reads slowly from {s.holder(source).replica}: {text}")
    s.push(reader, SourceSlow(current.number, next(iter(reader.leases)), text))


def reads_now(current: Round, reader: Worker) -> bool:
    """Tell whether a shard is in the middle of a read."""
    joined = current.joined.get(reader.shard)
    return joined is not None and joined.done_request is None and joined.orphaned_since_s is None
