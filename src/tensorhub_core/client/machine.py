"""Decide one round of a worker: `step(state, event, now) -> (state, effects)`; pure.

The order of a round: promise -> plan -> withdraw the old copy -> say that filling begins -> read and verify -> settle
-> ask whether the leases stood -> committed. Everything that can happen in between (other shards fail, sources vanish,
the server forgets us, time runs out, the caller's code raises) is decided here, and in every phase memory that may
still be written is given back only after the read job has ended.
"""

from __future__ import annotations

from tensorhub_core.client.moves import (
    STOP_GRACE_S,
    Step,
    confirm,
    content,
    fail,
    heard,
    join,
    lease_of,
    leave,
    note_progress,
    plan,
    proceed,
    promised,
    read,
    relocate,
    relocate_lost,
)
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.rounds import (
    Abandon,
    Advance,
    Answered,
    Begin,
    Broken,
    Effect,
    End,
    Event,
    Phase,
    PlanFailed,
    Planned,
    Pushed,
    ReadEnded,
    Reopened,
    RoundState,
    Settle,
    Settled,
    Stop,
    Tell,
    Tick,
    Unvouched,
    Withdrawn,
)
from tensorhub_core.errors import (
    DeadlineExceeded,
    StateError,
    TensorHubError,
    TransportError,
    VersionUnavailable,
    error_from_wire,
)
from tensorhub_core.state.messages import (
    Committed,
    Discard,
    Failure,
    LeaseLost,
    LeaveRound,
    NothingNewer,
    Ok,
    Promise,
    Reply,
    RoundAborted,
    Source,
    SourceProgress,
    SourceSlow,
)

MAX_DISCARDS = 8
MAX_REJOINS = 64


def step(state: RoundState, event: Event, now: float) -> tuple[RoundState, list[Effect]]:
    """Take one event at monotonic time `now` (seconds); return the state, changed in place, and what is to be done."""
    s = Step(state, now)
    if state.phase is Phase.ENDED:
        return state, s.effects
    match event:
        case Begin():
            state.clear = fills(state) and state.have is None and not state.published
            join(s)
        case Answered(asked, reply):
            if asked == state.asked:
                answered(s, reply)
        case Planned(converted):
            if state.phase is Phase.PLANNING:
                state.converted |= converted
                proceed(s)
        case PlanFailed(error, lease):
            if state.phase is Phase.PLANNING:
                plan_failed(s, error, lease)
        case Withdrawn(error):
            withdrawn(s, error)
        case ReadEnded(outcome):
            read_ended(s, outcome)
        case Unvouched(lease, kind, detail):
            unvouched(s, lease, kind, detail)
        case Settled(sums):
            settled(s, sums)
        case Pushed(message):
            pushed(s, message)
        case Reopened():
            rejoin(s)
        case Broken(error):
            if state.phase not in (Phase.STOPPING, Phase.LEAVING):
                leave(s, error)
        case Tick():
            tick(s)
    return state, s.effects


def rejoin(s: Step) -> None:
    """Ask for the promise again: the server may have forgotten it. A running read goes on meanwhile.

    The round keeps its number: a server that knows it goes on with it or says how it ended, and the other shards say
    theirs, so that the calls of all shards still meet (law L6).
    """
    state = s.state
    if state.phase in (Phase.STOPPING, Phase.LEAVING):
        return
    state.rejoins += 1
    if state.rejoins > MAX_REJOINS:
        return leave(s, StateError("the connection to the server was lost too often during this call"))
    state.entered = state.clear = False
    state.lost.clear()
    join(s, again=True)


def fills(state: RoundState) -> bool:
    """Tell whether the round fills the registered memory from others."""
    return state.mode in ("replicate", "update")


def answered(s: Step, reply: Reply) -> None:
    """Take the answer to the newest request."""
    phase = s.state.phase
    if phase is Phase.LEAVING:
        return conclude_leaving(s, reply)
    if isinstance(reply, Failure):
        return refused(s, error_from_wire(reply.code, reply.message, reply.differences))
    if phase is Phase.JOINING and isinstance(reply, Promise):
        return promised(s, reply)
    if phase is Phase.JOINING and isinstance(reply, NothingNewer):
        return nothing_newer(s, (reply.epoch, reply.number))
    if phase is Phase.ENTERING and isinstance(reply, Ok):
        s.state.entered = True
        return relocate_lost(s) if s.state.lost else read(s)
    if phase is Phase.RELOCATING and isinstance(reply, Promise):
        return promised(s, reply)
    if phase is Phase.CONFIRMING and isinstance(reply, Committed):
        return s.end(End(key=s.state.key, published=reply.published))
    if phase is Phase.CONFIRMING and isinstance(reply, Discard) and s.state.mode != "install":
        return discarded(s, reply.sources)
    leave(s, StateError(f"the server answered with {type(reply).__name__} while {phase.value}"))


def refused(s: Step, error: TensorHubError) -> None:
    """End a round that the server refuses to go on with; a read that still runs is stopped first."""
    state = s.state
    if state.asked == state.done_asked:
        state.done_asked = 0
    s.effects.append(Tell(LeaveRound(state.number, error.code, str(error))))  # for the shards that do not know it yet
    fail(s, error)


def plan_failed(s: Step, error: BaseException, lease: str) -> None:
    """Look for another source if one could not be described, else give up before a byte is written."""
    if lease:
        s.state.lost[lease], s.state.details[lease] = "unreachable", str(error)
        return relocate_lost(s)
    leave(s, error)


def nothing_newer(s: Step, key: tuple[int, int]) -> None:
    """Take the verdict that the memory already holds the version."""
    state = s.state
    if not state.touched:
        return s.end(End(key=key, held=True))
    if state.done_asked and key == state.key and not state.running:
        return s.end(End(key=key, published=state.offer))
    leave(s, StateError("the server takes this worker for a holder of another version"))


def withdrawn(s: Step, error: BaseException | None) -> None:
    """Take the end of the old copy's withdrawal, whatever happened to the round meanwhile."""
    state = s.state
    state.withdrawing = False
    if error is None:
        state.published, state.done_asked = False, 0
        state.clear = fills(state) and not state.rejoins
    if state.phase is Phase.WITHDRAWING:
        if error is not None:
            return leave(s, error)
        proceed(s)


def read_ended(s: Step, outcome: ReadOutcome) -> None:
    """Take the end of the read job; nothing of it can land any more."""
    state = s.state
    state.running, state.corrupt = False, outcome.corrupt
    if outcome.done_bytes > state.done_bytes:
        state.done_bytes, state.fruitless = outcome.done_bytes, 0
    if state.phase is Phase.STOPPING:
        return s.end(End(error=state.ending, dirty=state.touched))
    state.complete = outcome.end is ReadEnd.VERIFIED
    if state.phase is Phase.JOINING:
        return
    if state.complete:
        state.replan = False
        state.phase = Phase.SETTLING
        s.effects.append(Settle())
    elif state.replan:
        plan(s, keep=True)
    elif outcome.end is ReadEnd.SOURCE_FAILED:
        relocate(s, [(outcome.lease, outcome.kind, outcome.detail)])
    else:
        leave(s, StateError("the read was cancelled"))


def unvouched(s: Step, lease: str, kind: str, detail: str) -> None:
    """Read whole segments from a source that gives no checksums of parts; leave one whose bytes have changed."""
    state = s.state
    if state.phase is not Phase.READING or not state.running or state.replan:
        return
    source = next((source for source in state.sources if lease_of(state, source.lease) == lease), None)
    if kind == "corrupt":
        s.effects.append(Abandon(lease, detail, "corrupt"))
    elif source is not None and content(source) not in state.inexact:
        state.inexact.add(content(source))
        state.replan = True
        s.effects.append(Stop())


def settled(s: Step, sums: bytes) -> None:
    """Take the digest of the checksums and ask whether the bytes count."""
    s.state.sums = sums
    if s.state.phase is Phase.SETTLING:
        confirm(s)


def discarded(s: Step, sources: tuple[Source, ...]) -> None:
    """Read everything again: the leases did not stand until the end."""
    state = s.state
    state.discards += 1
    state.done_asked = 0
    if state.discards > MAX_DISCARDS or not sources:
        return leave(s, VersionUnavailable(f"the sources were lost {state.discards} times during the read"))
    state.sources, state.done_bytes = sources, 0
    note_progress(s, sources)
    plan(s, keep=False)


def pushed(s: Step, message: Reply) -> None:
    """Take a push; those of other rounds and leases are ignored."""
    state = s.state
    ours = {source.lease for source in state.sources}
    if isinstance(message, RoundAborted) and message.round == state.number:
        if state.phase not in (Phase.STOPPING, Phase.LEAVING):
            fail(s, error_from_wire(message.code, message.message))
    elif isinstance(message, LeaseLost) and message.lease in ours:
        if state.phase is Phase.READING and state.running:
            s.effects.append(Abandon(lease_of(state, message.lease), message.reason))
        elif state.phase in (Phase.PLANNING, Phase.WITHDRAWING, Phase.ENTERING):
            state.lost[message.lease] = message.reason
    elif isinstance(message, SourceSlow) and message.lease in ours:
        if state.phase is Phase.READING and state.running:
            s.effects.append(Abandon(lease_of(state, message.lease), message.reason, "slow"))
        elif state.phase in (Phase.PLANNING, Phase.WITHDRAWING, Phase.ENTERING):
            state.lost[message.lease] = "slow"
    elif isinstance(message, SourceProgress) and message.lease in ours:
        progressed(s, message)


def progressed(s: Step, message: SourceProgress) -> None:
    """Take how far a source is; of one without a manifest only as far as its checksums are known."""
    state, lease, prefix, whole = s.state, message.lease, message.prefix, message.whole
    if lease in state.known:
        known = heard(state.known[lease], message.first, message.sums)
        if known is None:
            return contradicted(s, lease)
        whole = whole and 8 * prefix <= len(known)
        state.known[lease], prefix = known, min(prefix, len(known) // 8)
    state.prefixes[lease] = max(prefix, state.prefixes.get(lease, 0))
    if whole:
        state.whole.add(lease)
    if state.running:
        s.effects.append(Advance(lease_of(state, lease), prefix, whole))


def contradicted(s: Step, lease: str) -> None:
    """Leave a source that announces other checksums than before."""
    state, text = s.state, "it announces other checksums than before"
    if state.phase is Phase.READING and state.running:
        s.effects.append(Abandon(lease_of(state, lease), text, "corrupt"))
    elif state.phase in (Phase.PLANNING, Phase.WITHDRAWING, Phase.ENTERING):
        state.lost[lease], state.details[lease] = "corrupt", text


def tick(s: Step) -> None:
    """Do what only time brings about."""
    state = s.state
    if state.give_up_s is not None:
        if s.now >= state.give_up_s:
            unquiet = state.running
            error = state.ending
            if unquiet:
                error = TransportError(
                    f"the read could not be stopped for {STOP_GRACE_S:g} s; it was to stop for: {error}"
                )
            s.end(End(error=error, dirty=state.touched, uncertain=bool(state.done_asked), unquiet=unquiet))
    elif state.deadline_s is not None and s.now >= state.deadline_s:
        leave(s, DeadlineExceeded(f"the deadline passed while {state.phase.value}"))


def conclude_leaving(s: Step, reply: Reply) -> None:
    """Take the server's last word on a round that was to be left: it may have been committed just before."""
    state = s.state
    if isinstance(reply, Committed):
        return s.end(End(key=state.key, published=reply.published))
    if isinstance(reply, NothingNewer) and state.done_asked and (reply.epoch, reply.number) == state.key:
        return s.end(End(key=state.key, published=state.offer))
    uncertain = state.done_asked not in (0, state.asked)
    error = state.ending
    if isinstance(reply, Failure) and isinstance(error, DeadlineExceeded) and reply.code == DeadlineExceeded.code:
        error = DeadlineExceeded(reply.message)  # it says who holds the version
    s.end(End(error=error, dirty=state.touched, uncertain=uncertain))
