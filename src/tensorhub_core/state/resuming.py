"""Rounds that outlive a connection or the server: shards come back to the round that they were in (laws L2, L6).

A server that goes on remembers how the newest rounds ended, for a shard that has lost the answer. One that was
restarted has forgotten the rounds, but the shards know their numbers: those that come back in the middle of one open it
again, and those that have ended it say with what, so that the others get the same or hear that it was broken off.
Where one is in the next round already, that one waits for its turn.
"""

from __future__ import annotations

from tensorhub_core.ids import VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.messages import Failure, JoinRound, NothingNewer
from tensorhub_core.state.records import Group, Round, Worker


def may_come_back(group: Group, number: int) -> bool:
    """Tell whether a round may be one of an earlier life of the server, which this one has not seen."""
    return group.first_round is None or not group.first_round <= number < group.next_round


def out_of_turn(s: Step, group: Group, worker: Worker, m: JoinRound) -> str:
    """Return why a shard cannot open a round now, or an empty text.

    After a restart one shard may be in a round that another one has left behind. The later one waits, without a
    promise, until the earlier one has ended: only shards that ended it there are in the later one, so all hear the
    same (law L2).
    """
    ahead = group.open_rounds()
    returns = comes_back(s, group, worker, m)
    expected = m.round == group.next_round or (returns and may_come_back(group, m.round))
    if not ahead:
        return "" if expected else f"{group.next_round} can"
    later, earlier = [r for r in ahead if r.number > m.round], [r for r in ahead if r.number < m.round]
    if not expected or any(worker.shard not in ended_before(s, group, r) for r in earlier):
        return f"{ahead[0].number} can"
    behind = [s.worker_at(group, shard) for r in later for shard in r.joined]
    left = all(w is not None and w.ended is not None and w.ended.round >= m.round for w in behind)
    if later and not (left and returns and all(r.key is None for r in later)):
        return f"{ahead[0].number} can"
    return ""


def passes_over(s: Step, group: Group, worker: Worker, m: JoinRound) -> Round | None:
    """Return the open round that a shard which comes back to a later one has left before the server knew of it.

    One without a promise gets what that shard ended it with, if that was told (law L6).
    """
    current = group.open_round()
    if current is None or not m.again or m.round <= current.number or worker.shard in current.joined:
        return None
    if not may_come_back(group, m.round) or worker.shard in ended_before(s, group, current):
        return None
    if current.key is None and worker.ended is not None and worker.ended.round == current.number:
        current.resumed = True
        return None
    return current


def told_before(s: Step, group: Group, worker: Worker) -> tuple[int, VersionKey] | None:
    """Return the round after a shard's last one, and the version with which others ended it in an earlier life.

    None if there is none, or if it was not the version that this shard's last round ended with. Others cannot have
    committed a round without this shard: they heard that there was nothing newer, and it hears that too (law L2).
    """
    last = worker.ended
    if last is None or last.key is None or not may_come_back(group, last.round + 1):
        return None
    ends = {w.ended.key for w in s.members(group) if w.ended is not None and w.ended.round == last.round + 1}
    return (last.round + 1, last.key) if ends == {last.key} else None


def comes_back(s: Step, group: Group, worker: Worker, m: JoinRound) -> bool:
    """Tell whether a shard joins a round of an earlier life of the server: again, or as the last one to call it."""
    told = None if m.again else told_before(s, group, worker)
    return m.again or (told is not None and told[0] == m.round)


def nothing_newer_before(s: Step, group: Group, worker: Worker, m: JoinRound) -> NothingNewer | None:
    """Return what the others heard of a round before the server restarted, if it is true of this shard as well.

    None while the server listens: the round is then opened, and waits.
    """
    told = told_before(s, group, worker)
    if told is None or m.round != told[0] or s.state.in_grace(s.now) or m.mode not in ("update", "stage"):
        return None
    has_it = m.have is not None and (m.have[0], m.have[1]) == told[1] and m.want in (None, told[1][1])
    return NothingNewer(m.round, *told[1]) if has_it else None


def begin(group: Group, current: Round) -> None:
    """Open a round; numbers only go up, except when a shard comes back to an older one than the others."""
    group.rounds[current.number] = current
    group.next_round = max(group.next_round, current.number + 1)
    first = group.first_round
    group.first_round = current.number if first is None else min(first, current.number)


def keep_end(s: Step, group: Group, number: int, end: Failure | NothingNewer) -> None:
    """Remember how a round ended, for who comes back to it; of the newest rounds only. The next one has its turn."""
    group.ended[number] = end
    following = group.open_round()
    if following is not None and following.join_by_s is not None:
        following.join_by_s = s.now + s.state.config.join_timeout_s
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
