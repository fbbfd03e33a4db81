"""Who is here: hello, heartbeat, leave, suspicion and death (laws L4, L5, L7, L8)."""

from __future__ import annotations

from tensorhub_core.errors import ConfigError, ProtocolMismatch, StateError, TensorHubError
from tensorhub_core.ids import Digest, ModelName, ReplicaName, SessionId, WorkerId
from tensorhub_core.state import leaving, retention, zones
from tensorhub_core.state.bounds import MOST_SERVER_EPOCH
from tensorhub_core.state.calling import note_call
from tensorhub_core.state.context import NO_SESSION, Step, failure
from tensorhub_core.state.events import Send
from tensorhub_core.state.hearing import hear_high, is_known, own_epoch
from tensorhub_core.state.index import mark
from tensorhub_core.state.leases import drop_copy, end_lease, revoke_lease
from tensorhub_core.state.links import seat_of
from tensorhub_core.state.manifests import forget_prefix
from tensorhub_core.state.messages import (
    PROTOCOL,
    Hello,
    NothingNewer,
    Ok,
    Register,
    Superseded,
    UnknownSession,
    Welcome,
)
from tensorhub_core.state.names import model_of
from tensorhub_core.state.records import CopyState, Group, ModelState, Registration, Worker
from tensorhub_core.state.resourcing import forgive
from tensorhub_core.state.resuming import ended_before, told_before
from tensorhub_core.state.rounds import abort
from tensorhub_core.state.tickets import end_with_connection
from tensorhub_core.state.versions import current_epoch, note_told, note_whole_before, put_copy, show

_RETIRED_TOKENS = 64
_FEW_WAITS = 64


def hello(s: Step, session: SessionId, request: int, m: Hello) -> None:
    """Open a session, or take up an old one; answers `Welcome`, `Failure` or `Superseded`."""
    try:
        check_hello(s, m)
        model = model_of(s, ModelName(m.model))
    except TensorHubError as error:
        s.effects.append(Send(session, request, failure(error)))
        return
    model.retain = s.state.config.retain_of(model.name)
    hear_high(s, model, m)
    if m.observer:
        worker = admit(s, session, m)
        return welcome(s, worker, request, None)
    group = model.groups.get(ReplicaName(m.replica))
    if group is not None and m.token in group.retired:
        text = f"another process has taken the place of {m.replica}/{m.shard} of model {m.model!r}"
        s.effects.append(Send(session, request, Superseded(text)))
        return
    if group is not None and group.num_shards != m.num_shards:
        for old in s.members(group):
            supersede(s, old, f"replica {m.replica!r} started again with {m.num_shards} shards")
        group = model.groups.get(ReplicaName(m.replica))
    if group is None:
        group = Group(model.name, ReplicaName(m.replica), 0, m.num_shards, m.zone, m.host, m.spot)
        add_group(s, model, group)
    worker_or_none = s.worker_at(group, m.shard)
    if worker_or_none is not None and worker_or_none.token == m.token:
        worker = resume(s, worker_or_none, session)
    else:
        if worker_or_none is not None:
            supersede(s, worker_or_none, f"another process has taken the place of {m.replica}/{m.shard}")
        worker = admit(s, session, m)
        if group.replica not in model.groups:  # its last member has gone, perhaps from this very session
            add_group(s, model, group)
        take_place(group, worker)
        group.zone, group.host, group.spot, group.keeper, group.seeds = m.zone, m.host, m.spot, m.keeper, m.seeds
        for member in s.members(group):
            mark(s, member)
        group.generation += 1
        zones.note_group(s, model, group)
    worker.announces_sums, worker.casts = m.announces_sums, m.casts
    worker.host, worker.rail = m.host, m.rail
    for member in s.members(group):
        member.seat = seat_of(group, member)
    mark(s, worker)
    note_told(worker, m.high)
    note_ended(s, group, worker, m)
    welcome(s, worker, request, group)
    take_back(s, worker, m)
    retention.take_back(s, worker, m)


def take_place(group: Group, worker: Worker) -> None:
    """Make a worker the one of its shard."""
    group.members[worker.shard] = worker.id
    if next(reversed(group.members)) < max(group.members):
        group.members = dict(sorted(group.members.items()))


def add_group(s: Step, model: ModelState, group: Group) -> None:
    """Put a replica behind the model's others."""
    group.place = s.state.counter
    model.groups[group.replica] = group


def check_hello(s: Step, m: Hello) -> None:
    """Refuse a hello that cannot be admitted; raises ProtocolMismatch, ConfigError or StateError."""
    config = s.state.config
    if m.protocol != PROTOCOL:
        raise ProtocolMismatch(f"the client speaks protocol {m.protocol}, this server {PROTOCOL}: run the same release")
    for what, text in (("stream", m.stream), ("zone", m.zone), ("host", m.host), ("rail", m.rail)):
        if text is not None and len(text.encode("utf-8", "surrogatepass")) > config.max_name_bytes:
            raise ConfigError(f"{what} must be a name of at most {config.max_name_bytes} bytes")
    for what, text in (("model", m.model), ("replica", m.replica), ("token", m.token)):
        if not text or len(text.encode("utf-8", "surrogatepass")) > config.max_name_bytes:
            raise ConfigError(f"{what} must be a name of 1 to {config.max_name_bytes} bytes")
    if not 0 <= m.server_epoch <= MOST_SERVER_EPOCH:
        raise ConfigError(f"no server has the epoch {m.server_epoch}")
    known = s.state.models.get(ModelName(m.model))
    if len(s.state.workers) >= config.max_workers and (known is None or not is_known(s, known, m)):
        raise StateError(f"the server has its limit of {config.max_workers:,} connections")
    if not 1 <= m.num_shards <= config.max_shards or not 0 <= m.shard < m.num_shards:
        raise ConfigError(f"shard {m.shard} of {m.num_shards} is not possible (at most {config.max_shards} shards)")


def admit(s: Step, session: SessionId, m: Hello) -> Worker:
    """Make a new worker for a session."""
    forget_session(s, session)
    worker = Worker(
        WorkerId(s.new_id("w")),
        session,
        m.token,
        ModelName(m.model),
        ReplicaName(m.replica),
        m.shard,
        m.observer,
        m.stream,
        s.now,
        own_epoch(m),
    )
    worker.zone = m.zone
    s.state.workers[worker.id] = worker
    s.state.sessions[session] = worker.id
    return worker


def resume(s: Step, worker: Worker, session: SessionId) -> Worker:
    """Let a worker go on under another session; what it asked under the old one it asks again."""
    end_with_connection(s, worker)
    if session != worker.session:
        forget_session(s, session)
        s.state.sessions.pop(worker.session, None)
        worker.session = session
        s.state.sessions[session] = worker.id
    heard_from(s, worker)
    return worker


def lose_session(s: Step, session: SessionId) -> None:
    """Detach a worker whose replies were lost: it has to say hello again, and asks again what it waits for."""
    worker = s.state.sessions.pop(session, None)
    if worker is not None:
        s.state.workers[worker].session = NO_SESSION
        end_with_connection(s, s.state.workers[worker])


def forget_session(s: Step, session: SessionId) -> None:
    """End whatever worker used this session before."""
    old = s.state.sessions.get(session)
    if old is not None:
        remove(s, s.state.workers[old], "its session says hello as someone else")


def welcome(s: Step, worker: Worker, request: int, group: Group | None) -> None:
    """Answer a hello."""
    config, model = s.state.config, s.model(worker)
    s.touch(worker)
    s.reply(
        worker,
        request,
        Welcome(
            worker.id,
            config.server_epoch,
            0 if group is None else group.generation,
            0 if group is None else first_round(s, group, worker),
            current_epoch(model),
            config.lease_s,
            config.heartbeat_s,
        ),
    )


def note_ended(s: Step, group: Group, worker: Worker, m: Hello) -> None:
    """Take note of the last round that a worker was in: numbers go on where they were before the server restarted.

    Who was told a lower number meanwhile says hello again. A round that the worker has left, with its word about that
    lost, is broken for the others as well.
    """
    before, worker.ended = worker.ended, m.ended
    if m.ended is None or m.ended == before:
        return
    current = group.open_round()
    if m.ended.round >= group.next_round and (current is None or current.resumed):
        group.next_round = m.ended.round + 1
        for other in s.members(group):
            if other is not worker and current is None:  # or it hears how that one ends
                s.push(other, UnknownSession(s.state.config.server_epoch))
    for each in group.open_rounds():
        if m.ended.round == each.number and m.ended.key is not None and worker.shard not in each.joined:
            each.resumed = each.resumed or each.key is None  # the others called it after the restart: they get the same
        if m.ended.round >= each.number and worker.shard in each.joined:
            text = f"shard {worker.shard} of replica {group.replica!r} has left the round"
            abort(s, group, each, StateError(text), told=worker.shard)


def first_round(s: Step, group: Group, worker: Worker) -> int:
    """Return the round that a worker calls next.

    For a newcomer the open one that nobody of its shard joined, else the next. For one that comes back between two
    calls also the one after its last, if there was nothing newer for the others: it would be a round ahead of them.
    They may have heard that from a server before this one. So also if that round has just failed for the others: this
    is most likely the same call of all. If it is not, because this shard did not make that call, it is a failure more.
    """
    last = -1 if worker.ended is None else worker.ended.round
    unheard = group.rounds.get(last + 1) if last >= 0 else None
    unheard = unheard if unheard is not None and worker.shard in unheard.unheard else None
    if unheard is not None and isinstance(unheard.verdict, NothingNewer):
        return unheard.number
    told = told_before(s, group, worker)
    if told is not None:
        return told[0]
    for current in group.open_rounds():
        if worker.shard not in {*current.joined, *ended_before(s, group, current)}:
            return current.number
    fresh = unheard is not None and unheard.join_by_s is not None and s.now < unheard.join_by_s
    if unheard is not None and fresh and all(w.ended is not None for w in s.members(group)):
        return unheard.number  # no newcomer is among them, who goes on with the next one
    return group.next_round


def take_back(s: Step, worker: Worker, m: Hello) -> None:
    """Publish again what a worker held before the server restarted or forgot it (laws L7, L10)."""
    held = m.held
    if held is None or worker.copy is not None:
        return
    memory = Registration(
        Digest(held.layout), Digest(held.placement), held.total_bytes, held.num_segments, held.portable
    )
    key = (held.epoch, held.number)
    record = s.model(worker).versions.get(key)
    bound = None if record is None else record.manifests.get(memory.layout)
    if bound is not None and bound != held.sums:
        s.log("warning", f"{worker.replica}/{worker.shard} holds other bytes of version {show(key)}: not offered")
        return
    worker.memory = memory
    put_copy(s, worker, key, memory, Digest(held.sums), held.converted)
    note_whole_before(s, s.group(worker), key)


def register(s: Step, worker: Worker, request: int, m: Register) -> None:
    """Note a worker's registered memory; refused while a copy depends on the old one."""
    layout, placement = Digest(m.layout), Digest(m.placement)
    if layout not in s.state.blobs or placement not in s.state.blobs:
        return s.fail(worker, request, StateError("the layout and placement blobs were not uploaded before register"))
    if m.total_bytes < 0 or m.num_segments < 0:
        return s.fail(worker, request, StateError("sizes cannot be negative"))
    memory = Registration(layout, placement, m.total_bytes, m.num_segments, m.portable)
    if worker.copy is not None and worker.memory != memory and worker.copy.state is not CopyState.HELD:
        text = f"version {show(worker.copy.key)} is {worker.copy.state.value}: unpublish() before registering again"
        return s.fail(worker, request, StateError(text))
    if worker.memory != memory:
        worker.staging = None
        if worker.awaited is not None:
            drop_copy(s, worker.awaited, "its holder registered other memory")
    worker.memory = memory
    s.touch(worker)
    s.reply(worker, request, Ok())


def supersede(s: Step, worker: Worker, reason: str) -> None:
    """End a worker for good: its place is taken."""
    s.push(worker, Superseded(reason))
    group = s.group(worker)
    remove(s, worker, reason)
    group.retired.append(worker.token)
    del group.retired[:-_RETIRED_TOKENS]


def remove(s: Step, worker: Worker, reason: str) -> None:
    """Forget a worker: its copies and leases end, its round is aborted for all shards of the group."""
    model = s.model(worker)
    s.touch(worker)
    zones.note_absent(s, worker)
    if not worker.observer:
        group = model.groups[worker.replica]
        if any(member.suspected for member in s.members(group)):
            s.touched.add(model.name)  # somebody may have waited for it to be heard again
        for current in group.open_rounds():
            error = StateError(f"shard {worker.shard} of replica {group.replica!r} is gone ({reason})")
            abort(s, group, current, error, told=worker.shard)
        keys = {copy.key for copy in worker.copies()}
        for copy in worker.copies():
            drop_copy(s, copy, f"{worker.replica}/{worker.shard} is gone ({reason})")
        group.members.pop(worker.shard, None)
        if not group.members:
            del model.groups[group.replica]
            zones.note_gone(s, model, group)
        model.handovers.discard(worker.id)
        model.stuck.discard(worker.id)
        leaving.after_failure(s, model.name, group.replica, keys, reason)
    for lease_id in sorted(worker.leases):
        end_lease(s, lease_id)
    s.state.reachability.forget(worker.id)
    del s.state.workers[worker.id]
    if len(model.waiting) > 2 * len(s.state.workers) + _FEW_WAITS:  # now and then: all may go, one after the other
        model.waiting = [waiting for waiting in model.waiting if waiting.worker in s.state.workers]
    if s.state.sessions.get(worker.session) == worker.id:
        del s.state.sessions[worker.session]
    s.drop(worker)
    if not worker.observer:
        s.log("info", f"{worker.model}/{worker.replica}/{worker.shard} ({worker.id}) is gone: {reason}")


def leave(s: Step, worker: Worker, request: int) -> None:
    """Let a worker go."""
    s.reply(worker, request, Ok())
    remove(s, worker, "it left")


def suspect(s: Step, worker: Worker) -> None:
    """Take a silent worker's leases and send no new reader to it; nothing is aborted (law L4)."""
    worker.suspected = True
    mark(s, worker)
    s.touch(worker)
    zones.note_absent(s, worker)
    if not worker.observer:
        s.log("warning", f"{worker.model}/{worker.replica}/{worker.shard} ({worker.id}) is silent: suspected")
    for lease_id in sorted(worker.leases):
        end_lease(s, lease_id)
    copy = worker.unfinished()
    if copy is not None:
        forget_prefix(s, copy)
        for lease_id in sorted(copy.leases):
            revoke_lease(s, lease_id, f"{worker.replica}/{worker.shard} is silent while it fills")


def check_silence(s: Step) -> None:
    """Suspect and bury workers that have been silent for too long."""
    config = s.state.config
    for worker in list(s.state.workers.values()):
        silent_s = s.now - worker.last_seen_s
        if silent_s >= config.dead_after_s:
            remove(s, worker, f"silent for {silent_s:.1f} s")
            note_burial(s)
        elif silent_s >= config.lease_s and not worker.suspected:
            suspect(s, worker)


def note_burial(s: Step) -> None:
    """Tell one worker's death from a server that nobody reaches: then it listens first when somebody comes back."""
    state = s.state
    state.buried = state.buried + 1 if s.now <= state.buried_s + state.config.lease_s else 1
    state.buried_s = s.now
    state.deserted = state.buried > 1 and not state.workers


def heard_from(s: Step, worker: Worker) -> None:
    """Note that a worker lives; who waits for what it holds, or left it while it was silent, may read from it again."""
    if worker.suspected:
        s.touched.add(worker.model)
        note_call(s, worker)
        forgive(s, worker)
        mark(s, worker)
        for copy in worker.copies():
            s.note(worker, copy.key)
    worker.last_seen_s, worker.suspected = s.now, False
