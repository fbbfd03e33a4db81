"""Rounds that outlive a connection or the server: shards come back to the round that they were in (laws L2, L6).

A server that goes on remembers how the newest rounds ended, for a shard that has lost the answer. One that was
restarted has forgotten the rounds, but the shards know their numbers: those that come back in the middle of one open it
again, and those that have ended it say with what, so that the others get the same or hear that it was broken off.
"""

from __future__ import annotations

from tensorhub_core.ids import VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.messages import Failure, NothingNewer
from tensorhub_core.state.records import Group, Round


def may_come_back(group: Group, number: int) -> bool:
    """Tell whether a round may be one of an earlier life of the server, which this one has not seen."""
    return group.first_round is None or not group.first_round <= number < group.next_round


def begin(group: Group, current: Round) -> None:
    """Open a round; numbers only go up, except when a shard comes back to an older one than the others."""
    group.rounds[current.number] = current
    group.next_round = max(group.next_round, current.number + 1)
    first = group.first_round
    group.first_round = current.number if first is None else min(first, current.number)


def keep_end(s: Step, group: Group, number: int, end: Failure | NothingNewer) -> None:
    """Remember how a round ended, for a shard that comes back to it; of the newest rounds only."""
    group.ended[number] = end
    for old in sorted(group.ended)[: -s.state.config.kept_rounds]:
        del group.ended[old]


def ended_before(s: Step, group: Group, current: Round) -> dict[int, VersionKey | None]:
    """Return the shards that ended a round in an earlier life of the server, each with its version or without one."""
    found: dict[int, VersionKey | None] = {}
    if not current.resumed:
        return found
    for worker in s.members(group):
        end = worker.ended
        if end is not None and end.round >= current.number and worker.shard not in current.joined:
            found[worker.shard] = end.key if end.round == current.number else None
    return found
