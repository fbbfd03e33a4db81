"""Spare readers the attempt to reach machines that others could not reach from theirs (`reachability.py`).

Where there is no other source it is tried nevertheless, once in each round. Before that the round waits, as long as
such an attempt takes, for somebody else who may get the version meanwhile: replicas ask for one at about the same time.
"""

from __future__ import annotations

from collections.abc import Collection

from tensorhub_core.ids import CopyId, VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.leases import revoke_lease
from tensorhub_core.state.records import Copy, Group, Round, Worker

HOLD_S = 3.0
"""As long as it takes to connect to a machine that does not answer."""


def note_failure(s: Step, reader: Worker, source: Worker, kind: str) -> None:
    """Take note of how a source failed its reader: a silent one may be gone, which is another matter."""
    if kind == "unreachable" and not source.suspected:
        s.state.reachability.learn(reader, source, s.now)


def in_full(reader: Worker, source: Worker, kind: str, detail: str) -> str:
    """Return what exactly failed; of a source that was not reached also on which machines the two are, and a remedy."""
    if kind != "unreachable" or not (reader.host or source.host) or reader.host == source.host:
        return detail
    where = f"from machine {reader.host or 'unknown'!r} to {source.host or 'unknown'!r}"
    advice = "if either has several networks, name the right one there by --interface or TENSORHUB_INTERFACE"
    return f"{detail}; {where}: {advice}" if detail else f"{where}: {advice}"


def note_read(s: Step, reader: Worker) -> None:
    """Take note that a reader has read all it wanted from its source; of several it may not have read each."""
    for lease in reader.leases if s.state.reachability.pairs and len(reader.leases) == 1 else ():
        source = s.state.copies[s.state.leases[lease].copy].worker
        s.state.reachability.reached(reader, s.state.workers[source])


def out_of_reach(s: Step, reader: Worker, key: VersionKey) -> set[CopyId]:
    """Return the copies of a version that a reader most likely cannot reach."""
    known, model = s.state.reachability, s.model(reader)
    if not known.any_from(reader):
        return set()
    holders = [w for name in model.holders.get(key, ()) for w in s.members(model.groups[name])]
    return {c.id for w in holders if known.apart(reader, w, s.now) for c in w.copies() if c.key == key}


def reads_in_vain(s: Step, reader: Worker) -> bool:
    """Tell whether a reader most likely cannot reach any of its sources: nobody should queue behind it."""
    known = s.state.reachability
    if not reader.leases or not known.any_from(reader):
        return False
    sources = [s.state.copies[s.state.leases[lease].copy] for lease in reader.leases]
    return all(known.apart(reader, s.holder(copy), s.now) for copy in sources)


def holds(s: Step, group: Group, reader: Worker, current: Round, copies: Collection[Copy]) -> bool:
    """Tell whether a shard that was promised nothing yet had better wait than try copies that are out of its reach."""
    known = s.state.reachability
    if current.join_by_s is not None or not copies or not known.any_from(reader):
        return False
    if not all(known.apart(reader, s.holder(copy), s.now) for copy in copies):
        return False
    if current.held_since_s is None:
        current.held_since_s = s.now
    return s.now < current.held_since_s + HOLD_S and _others_may_bring_it(s, group, reader)


def goes_behind(s: Step, reader: Worker, current: Round) -> bool:
    """Let a promised shard that cannot reach its source wait a moment for others who are getting the version.

    Those who queue behind it look for other sources, so that it can queue behind them. False if there is nobody.
    """
    joined = current.joined.get(reader.shard)
    if joined is None or "unreachable" not in current.avoid.get(reader.shard, {}).values():
        return False
    if joined.orphaned_since_s is not None and s.now >= joined.orphaned_since_s + HOLD_S:
        return False
    copy, waits = reader.unfinished(), False
    for lease in sorted(copy.leases) if copy is not None else ():
        revoke_lease(s, lease, f"{reader.replica} itself cannot reach the source")
        waits = True
    return waits or _others_may_bring_it(s, s.group(reader), reader, current.key)


def _others_may_bring_it(s: Step, group: Group, reader: Worker, key: VersionKey | None = None) -> bool:
    """Tell whether there is a worker within reach, of another replica, that fills the same memory when it reads.

    With a version: one that is reading it now.
    """
    assert reader.memory is not None
    return any(
        worker.memory is not None
        and worker.memory.layout == reader.memory.layout
        and not worker.suspected
        and (key is None or ((copy := worker.unfinished()) is not None and copy.key == key))
        and not s.state.reachability.apart(reader, worker, s.now)
        for other in s.model(reader).groups.values()
        if other.replica != group.replica
        for worker in s.members(other)
    )
