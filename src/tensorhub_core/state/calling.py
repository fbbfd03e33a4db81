"""Whose round has to be looked at when something new became available: an index, so that not all replicas are.

A round that was promised a version goes on by what its own replica says, or by what becomes of its sources, and then
its replica is looked at anyway. Only rounds without a promise, and those that lost a source, were failed by one or wait
for silent ones, depend on others; and in the grace after a restart all do. The index may name more replicas than that,
never fewer.
"""

from __future__ import annotations

from tensorhub_core.ids import ReplicaName
from tensorhub_core.state.context import Step
from tensorhub_core.state.records import Group, Joined, ModelState, Worker


def note_call(s: Step, worker: Worker) -> None:
    """Take note that a worker asks for something that its round may have to wait for."""
    s.model(worker).calling.add(worker.replica)


def note_settled(s: Step, model: ModelState, replica: ReplicaName) -> None:
    """Keep a replica whose round was just looked at in the index, or let go of it."""
    group = model.groups.get(replica)
    if group is not None and (s.state.in_grace(s.now) or waits_for_others(group)):
        model.calling.add(replica)
    else:
        model.calling.discard(replica)


def waits_for_others(group: Group) -> bool:
    """Tell whether what other replicas do may give a round of this one a promise, a source or an end."""
    open_rounds = [current for current in group.rounds.values() if current.verdict is None]
    return any(
        current.key is None or current.awaits_silent or current.avoid or any(map(is_orphaned, current.joined.values()))
        for current in open_rounds
    )


def is_orphaned(joined: Joined) -> bool:
    """Tell whether a promised shard has lost its source and has no other yet."""
    return joined.orphaned_since_s is not None and joined.done_request is None


def callers(model: ModelState) -> list[ReplicaName]:
    """Return the replicas to look at, in the order in which they came."""
    return sorted(model.calling & model.groups.keys(), key=lambda name: model.groups[name].place)
