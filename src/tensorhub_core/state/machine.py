"""The reference server's machine: `step(state, event, now) -> (state, effects)`.

Decides everything and does nothing: time, identities and messages are arguments, effects are returned. The state is
changed in place and returned; whoever wants to keep the old one (the walker) copies it first.
"""

from __future__ import annotations

from tensorhub_core.errors import DeadlineExceeded, StateError
from tensorhub_core.ids import ModelName, SessionId
from tensorhub_core.state import (
    blobs,
    calling,
    leaving,
    membership,
    reads,
    relieving,
    retention,
    rounds,
    staging,
    status,
    stragglers,
    tickets,
    versions,
    zones,
)
from tensorhub_core.state.bounds import MOST_SERVER_EPOCH
from tensorhub_core.state.context import Step, failure
from tensorhub_core.state.events import Disconnected, Effect, Event, Outdated, Received, Send, Tick
from tensorhub_core.state.leases import settle_drains
from tensorhub_core.state.messages import (
    Announce,
    AskSums,
    Cancel,
    DescribeVersion,
    Done,
    Filling,
    GetBlob,
    GetStatus,
    GiveSums,
    HandOver,
    Heartbeat,
    Hello,
    JoinRound,
    Leave,
    LeaveRound,
    ListVersions,
    Offloaded,
    OffloadFailed,
    Ok,
    Publish,
    PutBlob,
    Register,
    RegisterStaging,
    Relocate,
    Request,
    UnknownSession,
    Unpublish,
    Unstage,
    Wait,
)
from tensorhub_core.state.records import MachineConfig, ServerState, Worker

__all__ = ["MachineConfig", "ServerState", "step"]

_OF_SHARDS = (
    *(Register, RegisterStaging, Publish, Unpublish, Unstage, Offloaded, OffloadFailed, HandOver),
    *(JoinRound, Filling, Announce, AskSums, GiveSums, Relocate, Done, LeaveRound),
)
"""What an observer, which holds no shard, cannot ask."""


def step(state: ServerState, event: Event, now: float) -> tuple[ServerState, list[Effect]]:
    """Take one event at monotonic time `now` (seconds) and return the new state and what is to be done."""
    s = Step(state, now)
    if now - state.now_s > 2 * state.config.heartbeat_s:
        forgive_own_silence(s)
    was_listening = state.listening and state.in_grace(state.now_s)
    state.now_s = now
    if was_listening and not state.in_grace(now):
        s.touched.add_all(state.models)
        retention.after_grace(s)
    if isinstance(event, Received):
        receive(s, event.session, event.request, event.message)
    elif isinstance(event, Tick):
        tick(s)
    elif isinstance(event, Disconnected):
        membership.lose_session(s, event.session)
    if s.touched_groups or s.changed or s.touched or s.kept:
        settle(s)
    return state, s.effects


def forgive_own_silence(s: Step) -> None:
    """Not count a pause of the server itself as the workers' silence."""
    gap_s = s.now - s.state.now_s
    for worker in s.state.workers.values():
        worker.last_seen_s += gap_s
    for lead in (lead for model in s.state.models.values() for lead in model.leads.values()):
        lead.since_s += gap_s


def receive(s: Step, session: SessionId, request: int, message: Request) -> None:
    """Carry out a request."""
    if isinstance(message, Hello):
        if s.state.config.server_epoch < message.server_epoch <= MOST_SERVER_EPOCH:
            s.effects.append(Outdated(message.server_epoch))
            return
        return membership.hello(s, session, request, message)
    known = s.state.sessions.get(session)
    if known is None:
        s.effects.append(Send(session, 0, UnknownSession(s.state.config.server_epoch)))
        return
    worker = s.state.workers[known]
    membership.heard_from(s, worker)
    if worker.observer and isinstance(message, _OF_SHARDS):
        return s.fail(worker, request, StateError("an observer holds no shard"))
    dispatch(s, worker, request, message)


def dispatch(s: Step, worker: Worker, request: int, message: Request) -> None:
    """Hand a worker's request to the part that decides it; what is asked most often is compared first."""
    match message:
        case Heartbeat():
            s.reply(worker, request, Ok())
        case Announce():
            reads.announce(s, worker, request, message)
        case GetBlob():
            blobs.get(s, worker, request, message)
        case PutBlob():
            blobs.put(s, worker, request, message)
        case JoinRound():
            calling.note_call(s, worker)
            rounds.join(s, worker, request, message)
        case Filling():
            reads.filling(s, worker, request, message)
        case Done():
            calling.note_call(s, worker)
            reads.done(s, worker, request, message)
        case Wait():
            versions.wait(s, worker, request, message)
        case Unpublish():
            versions.unpublish(s, worker, request, message)
        case Leave():
            membership.leave(s, worker, request)
        case Register():
            membership.register(s, worker, request, message)
        case RegisterStaging():
            staging.register(s, worker, request, message)
        case Publish():
            versions.publish(s, worker, request, message)
        case Offloaded():
            retention.offloaded(s, worker, request, message)
        case OffloadFailed():
            retention.offload_failed(s, worker, request, message)
        case HandOver():
            leaving.hand_over(s, worker, request, message)
        case Unstage():
            staging.unstage(s, worker, request, message)
        case AskSums():
            reads.ask_sums(s, worker, request, message)
        case GiveSums():
            tickets.give(s, worker, request, message)
        case Relocate():
            calling.note_call(s, worker)
            reads.relocate(s, worker, request, message)
        case LeaveRound():
            reads.leave_round(s, worker, request, message)
        case Cancel():
            cancel(s, worker, request, message)
        case DescribeVersion():
            status.describe_version(s, worker, request, message)
        case ListVersions():
            status.list_versions(s, worker, request, message)
        case GetStatus():
            status.get_status(s, worker, request, message)
        case Hello():
            raise AssertionError("a hello is handled before")


def cancel(s: Step, worker: Worker, request: int, m: Cancel) -> None:
    """Withdraw a deferred wait."""
    model = s.model(worker)
    for waiting in model.waiting:
        if waiting.worker == worker.id and waiting.request == m.request:
            model.waiting.remove(waiting)
            s.reply(worker, m.request, failure(DeadlineExceeded("the wait was cancelled")))
            break
    s.reply(worker, request, Ok())


def tick(s: Step) -> None:
    """Do what only time brings about."""
    s.state.ticked_s = s.now
    membership.check_silence(s)
    for model in s.state.models.values():
        zones.check_leads(s, model)
        rounds.check_rounds(s, model)
        stragglers.tell_stragglers(s, model)
        relieving.relieve(s, model)
    if s.now - s.state.swept_s >= blobs.KEEP_UNREFERENCED_S:
        blobs.sweep(s)


def settle(s: Step) -> None:
    """Answer what waits for conditions, until nothing moves any more.

    Who keeps a version is decided first: readers wait for one that will be offered again. Rounds come before drains: a
    reader that has lost its source may need a draining copy (law L3).
    """
    looked: set[ModelName] = set()
    while s.changed or s.kept or s.touched or s.touched_groups:
        if s.changed or s.kept:
            retention.settle(s)
        if s.touched:
            model = s.state.models[s.touched.take()]
            looked.add(model.name)
            s.touched_groups.add_all((model.name, replica) for replica in calling.callers(model))
            model.waiting = versions.settle_waits(s, model, model.waiting)
        if s.touched_groups:
            name, replica = s.touched_groups.take()
            looked.add(name)
            rounds.settle_round(s, s.state.models[name], replica)
            calling.note_settled(s, s.state.models[name], replica)
        if not s.touched and not s.touched_groups:
            s.kept.update(name for name in looked if retention.is_at_work(s.state.models[name]))
            looked.clear()
            if s.state.draining and not s.kept and not s.changed:
                settle_drains(s)
