"""Rounds: one promise for all shards of a replica, kept or broken together (laws L2, L4, L13)."""

from __future__ import annotations

from tensorhub_core.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub_core.ids import ReplicaName, VersionKey
from tensorhub_core.state.blobs import enclose
from tensorhub_core.state.context import Step, failure
from tensorhub_core.state.keeping import custodians
from tensorhub_core.state.leases import drop_copy, end_lease, source_of
from tensorhub_core.state.messages import (
    Failure,
    JoinRound,
    NothingNewer,
    Promise,
    RoundAborted,
)
from tensorhub_core.state.reaching import goes_behind
from tensorhub_core.state.records import UNFINISHED, CopyState, Group, Joined, ModelState, Round, Worker
from tensorhub_core.state.resourcing import may_wake, pardon, refresh_sums, tell_sources
from tensorhub_core.state.resuming import (
    begin,
    comes_back,
    ended_before,
    keep_end,
    nothing_newer_before,
    out_of_turn,
    passes_over,
)
from tensorhub_core.state.sourcing import describe_holders, lease_shard
from tensorhub_core.state.versions import current_epoch, highest_number, newest_seen, note_told, show, tell_promised
from tensorhub_core.state.zones import nothing_yet

_SAME_CALL_S = 1.0
"""How far a replica's calls of one round may be apart if it fails at once; `join_by_s` of a round that is over."""


def join(s: Step, worker: Worker, request: int, m: JoinRound) -> None:
    """Join a round; the answer is deferred until the round has a promise or a verdict."""
    group = s.group(worker)
    refusal = cannot_join(worker, m)
    if refusal:
        return s.fail(worker, request, StateError(refusal))
    current = group.rounds.get(m.round)
    if current is None:
        if m.again and m.round in group.ended:
            return s.reply(worker, request, group.ended[m.round])
        if (told := nothing_newer_before(s, group, worker, m)) is not None:
            return s.reply(worker, request, told)
        while (left_behind := passes_over(s, group, worker, m)) is not None:
            text = f"shard {worker.shard} of replica {group.replica!r} is in round {m.round} already: call again"
            abort(s, group, left_behind, StateError(text), told=worker.shard)
        other = out_of_turn(s, group, worker, m)
        if other:
            text = f"round {m.round} of replica {group.replica!r} cannot be joined now, {other}"
            return s.fail(worker, request, StateError(text))
        current = Round(m.round, m.want, m.mode)
        current.resumed = comes_back(s, group, worker, m)
        begin(group, current)
    if current.verdict is not None:
        return tell_verdict(s, group, worker, request, current)
    if worker.shard in current.joined and not m.again:
        return s.fail(worker, request, StateError(f"shard {worker.shard} has joined round {m.round} already"))
    before = current.joined.get(worker.shard)
    if before is not None and before.session == worker.session:
        answer_owed(s, worker, current, failure(StateError("the round was joined again")))
    have = None if m.have is None else (m.have[0], m.have[1])
    # Only a server that listens after a restart has forgotten promises; later this would be a way around a drain.
    promised = (m.promised[0], m.promised[1]) if m.promised is not None and s.state.in_grace(s.now) else None
    worker.room_bytes = m.room_bytes
    current.joined[worker.shard] = Joined(request, m.offer, have, m.prefix, promised, worker.session)
    text = disagreement(current, m, have)
    if text:
        return abort(s, group, current, StateError(f"shards of replica {group.replica!r} {text}"))
    if current.kind == "install" and current.join_by_s is None:
        current.join_by_s = s.now + s.state.config.join_timeout_s
    s.touch(worker)


def cannot_join(worker: Worker, m: JoinRound) -> str:
    """Return why a worker cannot join a round of this mode, or an empty text."""
    if worker.memory is None:
        return "replicate needs registered tensors: call register() first"
    if m.mode == "stage" and worker.staging is None:
        return "staging needs staging memory: register it first"
    if m.mode == "install":
        staged = worker.staged  # a server that has restarted knows of none, and believes the worker
        if m.have is None:
            return "install needs a staged version"
        if staged is not None and (staged.key != tuple(m.have) or staged.state is CopyState.FILLING):
            return f"version {show(staged.key)} is {staged.state.value} in staging: nothing else can be installed"
    return ""


def disagreement(current: Round, m: JoinRound, have: VersionKey | None) -> str:
    """Return how a shard asks for something else than those before it, or an empty text."""
    if current.kind != Round(m.round, m.want, m.mode).kind:
        return f"called different things at the same time: {current.mode} and {m.mode}"
    if current.kind == "install":
        others = {joined.have for joined in current.joined.values()} | ({current.key} - {None})
        return "" if others == {have} else f"staged different versions: {', '.join(sorted(map(show, others)))}"
    if current.want != m.want:
        asked = ["latest" if want is None else str(want) for want in (current.want, m.want)]
        return f"asked for different versions: {asked[0]} and {asked[1]}"
    return ""


def tell_verdict(s: Step, group: Group, worker: Worker, request: int, current: Round) -> None:
    """Answer a shard that joins a round which has ended."""
    verdict = current.verdict
    assert verdict is not None
    current.unheard.discard(worker.shard)
    if not current.unheard:
        del group.rounds[current.number]
    if isinstance(verdict, (Failure, NothingNewer)):
        return s.reply(worker, request, verdict)
    s.fail(worker, request, StateError(f"round {current.number} of replica {group.replica!r} is over"))


def tell_promise(s: Step, worker: Worker, current: Round) -> None:
    """Answer a joined shard's open request with the round's promise and its own sources."""
    joined = current.joined[worker.shard]
    request, joined.join_request = joined.join_request, None
    assert current.key is not None
    if request is not None:
        sources = tuple(source_of(s, lease) for lease in current.leases.get(worker.shard, []))
        refresh_sums(s, current, worker)
        note_told(worker, current.key)
        s.reply(worker, request, Promise(current.number, *current.key, sources, enclose(s, worker, sources)))


def settle_round(s: Step, model: ModelState, replica: ReplicaName) -> None:
    """Give a promise or a verdict to a replica's waiting round."""
    group = model.groups.get(replica)
    current = None if group is None else group.open_round()
    if group is None or current is None:
        return
    over = ended_before(s, group, current)
    if current.key is None and None in over.values():  # then it ends, whatever else is heard yet
        return abort(s, group, current, ended_otherwise(group, current))
    if s.state.in_grace(s.now):
        return
    if current.key is not None:
        keep_promise(s, group, current)
    elif current.kind == "install":
        try_install(s, group, current)
    else:
        try_promise(s, model, group, current)


def try_install(s: Step, group: Group, current: Round) -> None:
    """Let the shards overwrite their memory as soon as all of them have said that they staged the version (law L13)."""
    key = next(joined.have for joined in current.joined.values())
    members, over = s.members(group), ended_before(s, group, current)
    assert key is not None
    if len(members) != group.num_shards:
        return
    if all(w.copy is not None and w.copy.key == key and w.copy.state is not CopyState.FILLING for w in members):
        return conclude(s, group, current, NothingNewer(current.number, *key))
    if any(end != key for end in over.values()):
        return abort(s, group, current, ended_otherwise(group, current))
    if len(current.joined) + len(over) == group.num_shards:
        current.key = key
        keep_promise(s, group, current)


def try_promise(s: Step, model: ModelState, group: Group, current: Round) -> None:
    """Promise one version to the whole group, with leases for all shards in the same step, if that can be done now."""
    members = s.members(group)
    if len(members) != group.num_shards or any(w.memory is None or w.suspected for w in members):
        return
    if over := ended_before(s, group, current):
        return promise_as_before(s, group, current, over)
    if current.want is None:
        newest = newest_seen(s, members[0])
        if newest is None:
            return
        key = newest
    else:
        key = (current_epoch(model), current.want)
    if current.mode in ("update", "stage") and all(holds(w, current, key) for w in members):
        return conclude(s, group, current, NothingNewer(current.number, *key))
    record = model.versions.get(key)
    was_whole = record is not None and record.was_whole
    current.key = key
    promised = any(joined.promised == key for joined in current.joined.values())
    if all(lease_shard(s, group, w.shard, current, promised) for w in members):
        current.join_by_s = s.now + s.state.config.join_timeout_s
        return keep_promise(s, group, current)
    waits = all(leases_stand(s, current, w.shard) or may_wake(s, group, w, current, promised) for w in members)
    waits = waits or bool(custodians(s, model, key, group.replica))
    drop_leases(s, current)
    current.key, current.awaits_silent = None, waits
    if waits:
        return
    gone = record is None and key[1] < highest_number(model, key[0])
    if was_whole or current.want is None or gone:
        text = f"version {show(key)} of model {model.name!r} has no reachable holder that this layout can read; "
        abort(s, group, current, VersionUnavailable(text + describe_holders(s, model, key)))


def promise_as_before(s: Step, group: Group, current: Round, over: dict[int, VersionKey | None]) -> None:
    """Promise the shards that are left what the others got before the server restarted, or break the round (law L6)."""
    key = next(iter(over.values()))
    others = {joined.promised for joined in current.joined.values()} - {None, key}
    if key is None or set(over.values()) != {key} or others or current.want not in (None, key[1]):
        return abort(s, group, current, ended_otherwise(group, current))
    members = [w for w in s.members(group) if w.shard not in over]
    if current.mode in ("update", "stage") and all(holds(w, current, key) for w in members):
        return conclude(s, group, current, NothingNewer(current.number, *key))
    current.key, current.join_by_s = key, s.now + s.state.config.join_timeout_s
    keep_promise(s, group, current)


def ended_otherwise(group: Group, current: Round) -> TensorHubError:
    """Return the error of a shard that comes back to a round which the others have left."""
    text = f"the other shards of replica {group.replica!r} ended round {current.number} before the server restarted"
    return StateError(f"{text}, and not with what this one was promised: call again")


def keep_promise(s: Step, group: Group, current: Round) -> None:
    """Answer the shards that joined late, or lack a source; one that lost its sources is leased others at once.

    Where all the others that are left are silent at the moment, the answer waits until one of them is heard or buried.
    """
    current.awaits_silent = False
    over = ended_before(s, group, current)
    for worker in [w for w in s.members(group) if w.shard not in over]:
        joined = current.joined.get(worker.shard)
        waits = joined is None or joined.join_request is not None or joined.source_request is not None
        if worker.suspected or not waits:
            continue
        if current.kind != "install" and not leases_stand(s, current, worker.shard):
            drop_leases_of(s, current, worker.shard)
            if not lease_again(s, group, worker.shard, current):
                if not may_wake(s, group, worker, current, promised=True) and not goes_behind(s, worker, current):
                    return abort(s, group, current, no_source_left(s, group, worker, current))
                current.awaits_silent = True
                if joined is not None and joined.orphaned_since_s is None:
                    joined.orphaned_since_s = s.now
                continue
        if joined is not None:
            tell_sources(s, worker, current)
            tell_promise(s, worker, current)
        else:
            s.model(worker).waiting = tell_promised(s, worker, s.model(worker).waiting)


def lease_again(s: Step, group: Group, shard: int, current: Round) -> bool:
    """Lease other sources to a shard, one that stalled only where there is no other; False if there are none."""
    if lease_shard(s, group, shard, current, promised=True):
        return True
    return pardon(s, current, shard) and lease_shard(s, group, shard, current, promised=True)


def holds(worker: Worker, current: Round, key: VersionKey) -> bool:
    """Tell whether a member of the group has the version already."""
    joined = current.joined.get(worker.shard)
    if joined is not None and joined.have == key:
        return True
    copies = (worker.copy, worker.staged if current.kind == "stage" else None)
    return any(c is not None and c.key == key and c.state not in UNFINISHED for c in copies)


def leases_stand(s: Step, current: Round, shard: int) -> bool:
    """Tell whether all leases of a shard still live (law L4); an install reads under none."""
    if current.kind == "install":
        return True
    leases = current.leases.get(shard, ())
    return bool(leases) and s.state.leases.keys() >= set(leases)


def no_source_left(s: Step, group: Group, worker: Worker, current: Round) -> TensorHubError:
    """Tell the story of a round that has run out of sources."""
    model = s.model(worker)
    assert current.key is not None
    tried = current.avoid.get(worker.shard, {})
    story = [
        f"{current.tried.get(copy_id, 'somebody')}: {in_words(kind, current.details.get((worker.shard, copy_id), ''))}"
        for copy_id, kind in tried.items()
    ]
    text = (
        f"version {show(current.key)} of model {model.name!r} lost its last source for {group.replica}/{worker.shard} "
        f"(tried: {'; '.join(story) or 'none'}; {describe_holders(s, model, current.key)})"
    )
    if tried and all(kind == "corrupt" for kind in tried.values()):
        return CorruptTransfer(text)
    return VersionUnavailable(text)


def in_words(kind: str, detail: str) -> str:
    """Say how a source failed."""
    return f"{kind} ({detail})" if detail else kind


def drop_leases(s: Step, current: Round) -> None:
    """End all leases of a round."""
    for shard in list(current.leases):
        drop_leases_of(s, current, shard)


def drop_leases_of(s: Step, current: Round, shard: int) -> None:
    """End the leases of one shard of a round."""
    for lease in current.leases.pop(shard, []):
        end_lease(s, lease)


def abort(s: Step, group: Group, current: Round, error: TensorHubError, told: int | None = None) -> None:
    """End a round for all shards in one step; its unfinished copies are nobody's source any more (law L13)."""
    verdict = failure(error)
    s.log("warning", f"round {current.number} of {group.model}/{group.replica} aborted: {verdict.message}")
    drop_leases(s, current)
    for worker in s.members(group):
        joined = current.joined.get(worker.shard)
        if joined is None:
            continue
        copy = worker.unfinished()
        if copy is not None and copy.key == current.key:
            drop_copy(s, copy, "its round was aborted")
        if not answer_owed(s, worker, current, verdict) and worker.shard != told:
            s.push(worker, RoundAborted(current.number, verdict.code, verdict.message))
    close_round(s, group, current, verdict)


def answer_owed(s: Step, worker: Worker, current: Round, answer: Failure) -> bool:
    """Answer all that a shard still waits for in a round; tell if there was anything."""
    joined = current.joined[worker.shard]
    owed = [n for n in (joined.join_request, joined.source_request, joined.done_request) if n is not None]
    joined.join_request = joined.source_request = joined.done_request = None
    for request in owed:
        s.reply(worker, request, answer)
    return bool(owed)


def conclude(s: Step, group: Group, current: Round, verdict: NothingNewer) -> None:
    """End a round that has nothing to do."""
    for worker in s.members(group):
        joined = current.joined.get(worker.shard)
        if joined is not None and joined.join_request is not None:
            s.reply(worker, joined.join_request, verdict)
    close_round(s, group, current, verdict)


def close_round(s: Step, group: Group, current: Round, verdict: Failure | NothingNewer) -> None:
    """Keep a verdict until every shard has heard it, bounded."""
    current.verdict, current.join_by_s = verdict, s.now + _SAME_CALL_S
    over = ended_before(s, group, current)
    current.unheard = {k for k in range(group.num_shards) if k not in current.joined and k not in over}
    keep_end(s, group, current.number, verdict)
    if not current.unheard:
        del group.rounds[current.number]
    ended = sorted(n for n, r in group.rounds.items() if r.verdict is not None)
    for number in ended[: -s.state.config.kept_rounds]:
        del group.rounds[number]
    s.touched_groups.add((group.model, group.replica))


def check_rounds(s: Step, model: ModelState) -> None:
    """End rounds that some shard never joined, or whose orphaned shard never came back for other sources."""
    for group in list(model.groups.values()):
        current = group.open_round()
        if current is not None and current.awaits_silent:
            s.touched_groups.add((group.model, group.replica))
        if current is None or (current.key is None and current.kind != "install"):
            continue
        over = ended_before(s, group, current)
        missing = [shard for shard in range(group.num_shards) if shard not in current.joined and shard not in over]
        if missing and current.join_by_s is not None and s.now >= current.join_by_s:
            abort(s, group, current, DeadlineExceeded(f"shards {missing} of {group.replica!r} never joined the round"))
            continue
        limit = 2 * s.state.config.dead_after_s
        for shard, joined in current.joined.items():
            if joined.orphaned_since_s is not None and s.now >= joined.orphaned_since_s + limit:
                what = "asked for no other" if joined.source_request is None else "no other was heard"
                text = f"shard {shard} lost its source and {what} for {limit:g} s{where(s, group, current)}"
                abort(s, group, current, DeadlineExceeded(text))
                break


def where(s: Step, group: Group, current: Round) -> str:
    """Say where the version is that a round waits for, to follow the text of its end; empty if it has sources."""
    model = s.state.models[group.model]
    if current.kind == "install" or (current.key is not None and not current.awaits_silent):
        return ""
    key = current.key or (current_epoch(model), current.want or 0)
    if current.key is None and current.want is None:
        newest = newest_seen(s, s.members(group)[0])
        if newest is None:
            return f"; {nothing_yet(model, group.zone)}"
        key = newest
    return f"; version {show(key)}: {describe_holders(s, model, key)}"
