"""The moves of the client's round machine: what a round does next, once it is decided. Pure; see `machine`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tensorhub_core.client.rounds import (
    Advance,
    Ask,
    Effect,
    End,
    Phase,
    Plan,
    Read,
    RoundState,
    Stop,
    Tell,
    Withdraw,
)
from tensorhub_core.errors import CorruptTransfer, StateError, TensorHubError, VersionUnavailable
from tensorhub_core.state.bounds import MOST_DETAIL, MOST_TEXT
from tensorhub_core.state.messages import (
    Done,
    Filling,
    JoinRound,
    LeaseFailure,
    LeaveRound,
    Promise,
    Relocate,
    Request,
    Source,
)

MAX_FRUITLESS = 8
"""Changes of source in a row without a new verified byte."""
MAX_RELOCATIONS = 64
LEAVE_GRACE_S = 2.0
"""How long a caller whose deadline passed waits for the server's last word, so that it is told the truth."""
STOP_GRACE_S = 30.0
"""How long a read may take to stop before its memory is declared lost."""

KINDS = ("lost", "stalled", "corrupt", "slow", "unreachable")
_WAITS_FOR_SERVER = (Phase.JOINING, Phase.ENTERING, Phase.RELOCATING, Phase.CONFIRMING)


@dataclass(slots=True)
class Step:
    """The state, the time, and the effects collected so far."""

    state: RoundState
    now: float
    effects: list[Effect] = field(default_factory=list)

    def ask(self, message: Request, phase: Phase) -> None:
        """Send a request and wait for its answer in `phase`."""
        self.state.asked += 1
        self.state.phase = phase
        self.effects.append(Ask(self.state.asked, message))

    def end(self, end: End) -> None:
        """End the round."""
        self.state.phase = Phase.ENDED
        self.effects.append(end)


def join(s: Step, again: bool = False) -> None:
    """Join the round, for the first time or again; all shards of the replica ask for the same, whatever they have read.

    A server that still knows our committed copy answers an update with `NothingNewer`, and so a stage or an install.
    """
    state = s.state
    mode, have = state.mode, state.have
    if state.touched and mode not in ("stage", "install"):
        mode, have = "update" if state.done_asked else "replicate", None
    how = (state.offer, state.prefix, state.key, state.room_bytes)
    s.ask(JoinRound(state.number, state.want, mode, have, *how, again), Phase.JOINING)


def promised(s: Step, promise: Promise) -> None:
    """Take a promise: the first one, one with other sources, or one of another life of the session."""
    state, key = s.state, (promise.epoch, promise.number)
    moved = state.key is not None and state.key != key
    installs = state.mode == "install"
    wrong = (moved and state.phase is Phase.RELOCATING) or state.want not in (None, promise.number)
    wrong = wrong or (key != state.have if installs else not promise.sources)
    if promise.round != state.number or wrong:
        text = f"version {promise.number} (epoch {promise.epoch}) from {len(promise.sources)} sources"
        return leave(s, StateError(f"the server promised {text}, which is not what this round asked for"))
    if moved and state.done_asked:
        state.published = True  # what was read may have been committed: nobody may see it change
    same = installs or (same_memory(state.sources, promise.sources) and same_sums(state, promise.sources))
    before, state.sources, state.key = state.sources, promise.sources, key
    state.lost.clear()
    note_progress(s, promise.sources)
    if state.running and same:
        state.aliases = {new.lease: lease_of(state, old.lease) for new, old in pairs_of(promise.sources, before)}
        state.phase, state.entered = Phase.READING, True
        s.effects.append(Tell(Filling(state.number, state.converted)))
        for source in promise.sources:
            s.effects.append(Advance(lease_of(state, source.lease), source.prefix, source.whole))
    elif state.running:
        state.phase, state.replan = Phase.READING, True
        s.effects.append(Stop())
    elif state.complete and same and state.sums is not None and not state.published:
        state.entered = True
        s.effects.append(Tell(Filling(state.number, state.converted)))
        confirm(s)
    else:
        plan(s, keep=True)


def same_memory(before: Sequence[Source], after: Sequence[Source]) -> bool:
    """Tell whether two promises name the very same bytes: content, addresses and transport agents, in any order."""
    return bool(before) and sorted(map(content, before)) == sorted(map(content, after))


def content(source: Source) -> tuple[bytes, bytes, bytes]:
    """Return what makes two sources the same memory."""
    return source.layout, source.placement, source.sums


def pairs_of(ones: Sequence[Source], others: Sequence[Source]) -> Iterable[tuple[Source, Source]]:
    """Return the sources of two promises that name the same memory, by pairs."""
    return zip(sorted(ones, key=content), sorted(others, key=content), strict=True)


def same_sums(state: RoundState, sources: Sequence[Source]) -> bool:
    """Tell whether copies without a manifest have the checksums that were heard; what was heard before stays known.

    `sources` are the same memory as those of the promise before.
    """
    for new, old in pairs_of(sources, state.sources):
        known = heard(state.known.pop(old.lease, b""), 0, new.known)
        if known is None:
            return False
        state.known[new.lease] = known
    return True


def heard(known: bytes, first: int, sums: bytes) -> bytes | None:
    """Return the packed checksums of a source that are known with some more, from segment `first` on.

    None: they contradict those that were known. Some of which those before are missing say nothing.
    """
    begin = 8 * first
    if begin > len(known):
        return known
    both = min(len(sums), len(known) - begin)
    return known + sums[both:] if sums[:both] == known[begin : begin + both] else None


def note_progress(s: Step, sources: Sequence[Source]) -> None:
    """Remember how much of each source may be read."""
    s.state.prefixes = {source.lease: source.prefix for source in sources}
    s.state.whole = {source.lease for source in sources if source.whole}
    known = s.state.known
    s.state.known = {source.lease: known.get(source.lease, source.known) for source in sources if source.partial}


def plan(s: Step, keep: bool) -> None:
    """Plan the read of what is still missing, from the present sources."""
    state = s.state
    state.phase, state.replan, state.complete, state.sums = Phase.PLANNING, False, False, None
    state.aliases = {}
    s.effects.append(Plan(keep))


def proceed(s: Step) -> None:
    """Go on after planning: withdraw the old copy, say that filling begins, read."""
    state = s.state
    if state.lost:
        return relocate_lost(s)
    if state.published:
        state.phase = Phase.WITHDRAWING
        if not state.withdrawing:
            state.withdrawing = True
            s.effects.append(Withdraw())
        return
    if not state.entered and not state.clear:
        return s.ask(Filling(state.number, state.converted), Phase.ENTERING)
    if not state.entered:
        state.entered = True
        s.effects.append(Tell(Filling(state.number, state.converted)))
    read(s)


def read(s: Step) -> None:
    """Start the read job."""
    s.state.phase, s.state.running, s.state.touched = Phase.READING, True, True
    s.effects.append(Read())


def relocate_lost(s: Step) -> None:
    """Ask for other sources in place of the lost ones."""
    details = s.state.details
    relocate(s, [(lease, reason, details.get(lease, "")) for lease, reason in s.state.lost.items()])


def relocate(s: Step, failures: Sequence[tuple[str, str, str]]) -> None:
    """Ask for other sources of the same version, a bounded number of times.

    A failure is a lease, its kind or the server's reason, and what exactly failed.
    """
    state = s.state
    state.fruitless += 1
    state.relocations += 1
    current = {lease_of(state, source.lease): source.lease for source in state.sources}
    reports = [
        LeaseFailure(current.get(lease, lease), kind if kind in KINDS else "lost", detail[:MOST_DETAIL])  # type: ignore[arg-type]
        for lease, kind, detail in failures
    ]
    if state.fruitless > MAX_FRUITLESS or state.relocations > MAX_RELOCATIONS:
        corrupt = any(report.kind == "corrupt" for report in reports)
        why = "; ".join(sorted({detail or kind for _, kind, detail in failures}))
        error: TensorHubError = (CorruptTransfer if corrupt else VersionUnavailable)(
            f"gave up after {state.relocations} changes of source; the last one failed: {why}"
        )
        return leave(s, error)
    state.lost.clear()
    state.details.clear()
    s.ask(Relocate(state.number, tuple(reports)), Phase.RELOCATING)


def confirm(s: Step) -> None:
    """Ask whether the leases stood until the end (law L4)."""
    assert s.state.sums is not None
    corrupt = tuple(source.lease for source in s.state.sources if lease_of(s.state, source.lease) in s.state.corrupt)
    s.ask(Done(s.state.number, s.state.sums, corrupt, s.state.converted), Phase.CONFIRMING)
    s.state.done_asked = s.state.asked


def lease_of(state: RoundState, lease: str) -> str:
    """Return the lease under which the running read knows a source."""
    return state.aliases.get(lease, lease)


def leave(s: Step, error: BaseException) -> None:
    """Break the round for all shards because this one cannot finish it."""
    state = s.state
    code = error.code if isinstance(error, TensorHubError) else TensorHubError.code
    s.effects.append(Tell(LeaveRound(state.number, code, str(error)[:MOST_TEXT] or type(error).__name__)))
    if not state.running and state.phase in _WAITS_FOR_SERVER:
        state.phase, state.ending, state.give_up_s = Phase.LEAVING, error, s.now + LEAVE_GRACE_S
        return
    fail(s, error)


def fail(s: Step, error: BaseException) -> None:
    """End the round; a running read is stopped first, so that no byte lands in memory the user got back."""
    state = s.state
    if state.running:
        state.phase, state.ending, state.give_up_s = Phase.STOPPING, error, s.now + STOP_GRACE_S
        s.effects.append(Stop())
        return
    s.end(End(error=error, dirty=state.touched, uncertain=bool(state.done_asked)))
