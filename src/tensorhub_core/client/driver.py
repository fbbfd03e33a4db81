"""Carry out one round: hand events to the machine and do what it says, on the calling thread."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.access import SourceFault
from tensorhub_core.client.announcing import Announcing
from tensorhub_core.client.asking import Asker
from tensorhub_core.client.awaiting import Bell
from tensorhub_core.client.exactness import carried_over
from tensorhub_core.client.machine import step
from tensorhub_core.client.moves import content, lease_of
from tensorhub_core.client.prefix_word import tag_of
from tensorhub_core.client.progress import ProgressCallback, ReadProgress, breaks
from tensorhub_core.client.progressive import Progressive, right_by, with_sums
from tensorhub_core.client.promised import Promised
from tensorhub_core.client.reading import Destination, ReadEnd, ReadHandle, ReadOutcome, SourceAccess
from tensorhub_core.client.round_parts import RoundParts
from tensorhub_core.client.rounds import (
    Abandon,
    Advance,
    Answered,
    Ask,
    Begin,
    Broken,
    Effect,
    End,
    Event,
    Phase,
    Plan,
    PlanFailed,
    Planned,
    Pushed,
    Read,
    ReadEnded,
    Reopened,
    RoundState,
    Settle,
    Settled,
    Stop,
    Tell,
    Tick,
    Unvouched,
    Withdraw,
    Withdrawn,
)
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import TensorHubError
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.bounds import MOST_CUTS
from tensorhub_core.state.messages import Announce, Done, Filling, PutBlob, Reply, Request, Source, Welcome

_POLL_S = 0.005
_IDLE_S = 0.25


class RoundDriver:
    """One round in flight. `run` belongs to one thread; `post` may be called from any."""

    def __init__(
        self, state: RoundState, parts: RoundParts, life: int, deadline: Deadline, progress: ProgressCallback | None
    ) -> None:
        self._state, self._parts, self._deadline = state, parts, deadline
        self.life = life
        """The life of the session that the round's requests and its number belong to; one that ends keeps its own."""
        self._inbox: deque[tuple[Event, int]] = deque()
        self._heard = Bell()
        self._effects: deque[Effect] = deque()
        self._progress = ReadProgress(progress, lambda error: self.post(Broken(error)))
        self._promised = Promised(parts.book)
        self._accesses: list[SourceAccess] = []
        self._plan: ReadPlan | None = None
        self._plan_key: tuple[tuple[bytes, bytes], ...] = ()
        self._verified: NDArray[np.bool_] | None = None
        self._handle: ReadHandle | None = None
        self._asker = Asker(parts.wire.submit, state.number, parts.exactness.patience_s, self._unvouched)
        self._own: Progressive | None = None
        """What is read of another layout may be followed: its checksums are announced."""
        self._announcing = Announcing()
        self._collected = False
        self.sums: PutBlob | None = None
        """The checksums of what was read, once it is verified."""
        self._unquiet = False
        self._end: End | None = None
        self.post(Begin())

    @property
    def state(self) -> RoundState:
        """Return the round's state; to be read after `run`."""
        return self._state

    def post(self, event: Event, life: int = 0) -> None:
        """Hand an event to the round; `life` goes with `Reopened`."""
        self._inbox.append((event, life))
        self._heard.ring()

    def on_push(self, message: Reply) -> None:
        """Hand a push of the server to the round."""
        self.post(Pushed(message))

    def on_reopened(self, welcome: Welcome, life: int) -> None:
        """Hand a new welcome to the round."""
        self.post(Reopened(welcome), life)

    def run(self) -> End:
        """Carry the round out until it is over; an exception of the calling thread (Ctrl-C) ends it cleanly."""
        while self._end is None:
            try:
                while self._effects:
                    self._carry_out(self._effects.popleft())
                if self._end is None:
                    event, life = self._next()
                    if life and self._state.phase not in (Phase.STOPPING, Phase.LEAVING):
                        self.life = life
                    if isinstance(event, Answered):
                        self._promised.hear(event.reply, self.life)
                    _, effects = step(self._state, event, time.monotonic())
                    self._effects.extend(effects)
            except BaseException as error:
                if self._end is None:
                    self.post(Broken(error))
        self._progress.end()
        if self._end.error is not None:
            self._show(None)
        self._asker.close()
        return self._end

    def _next(self) -> tuple[Event, int]:
        """Wait for the next event."""
        while True:
            orphan = self._state.running and self._handle is None
            if self._heard.wait_for(lambda: self._inbox, 0.0 if orphan or self._handle is not None else _IDLE_S):
                return self._inbox.popleft()
            if orphan:  # the job could not be started, or the caller was interrupted before
                return ReadEnded(ReadOutcome(ReadEnd.CANCELLED, np.zeros(0, np.bool_), 0)), 0
            due_s = self._state.deadline_s if self._state.give_up_s is None else self._state.give_up_s
            if due_s is not None and time.monotonic() >= due_s:
                return Tick(), 0
            if self._handle is not None:
                self._announce()
                self._ask_sums()
                outcome = self._wait(self._handle)
                if outcome is not None:
                    return ReadEnded(self._note(outcome)), 0

    def _wait(self, handle: ReadHandle) -> ReadOutcome | None:
        """Return the outcome of the read job if it has ended; an error that broke it ends the round unquiet."""
        try:
            return handle.wait(_POLL_S)
        except Exception as error:
            if not breaks(handle, error):
                raise  # the caller's own, from a signal handler
            self._handle, self._unquiet = None, True
            self.post(Broken(error))
            return None

    # --- effects ----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Ask(asked, message):
                if isinstance(message, Done) and self.sums and not self._promised.names(self.sums.digest, self.life):
                    self._tell(self.sums)  # a server that has restarted does not have them
                answer = lambda reply: self.post(Answered(asked, reply))  # noqa: E731
                self._parts.wire.submit(message, answer, life=self.life)
            case Tell(message):
                if isinstance(message, Filling):
                    self._announcing.begin()  # a server that has restarted knows nothing of it
                self._tell(message)
            case Plan(keep):
                self._make_plan(keep)
            case Withdraw():
                self._parts.withdraw(lambda error: self.post(Withdrawn(error)))
            case Read():
                self._read()
            case Advance(lease, prefix, whole):
                if self._handle is not None:
                    self._hear_sums(lease, self._handle)
                    self._handle.advance(lease, self._length_of(lease) if whole else prefix)
            case Abandon(lease, reason, kind):
                if self._handle is not None:
                    self._handle.fail(lease, reason, kind)
            case Stop():
                if self._handle is not None:
                    self._handle.cancel()
            case Settle():
                self.post(Settled(self._settle()))
            case End():
                self._end = dataclasses.replace(effect, unquiet=effect.unquiet or self._unquiet)

    def _tell(self, message: Request) -> None:
        try:
            self._parts.wire.tell(message, self.life)
        except TensorHubError as error:  # the session is over; whoever needs an answer hears of it
            get_logger("client").debug("not told: %s", error)

    def _make_plan(self, keep: bool) -> None:
        state = self._state
        prefixes = {lease: prefix for lease, prefix in state.prefixes.items() if lease not in state.whole}
        try:
            accesses = self._parts.book.access(state.sources, prefixes, self._deadline, state.known)
            layouts, own = [access.layout for access in accesses], self._parts.memory.layout
            if self._parts.check is not None and any(layout != own for layout in layouts):
                self._parts.check(layouts)
            plan = self._plan_of(own, self._parts.memory.table, accesses)
        except SourceFault as fault:
            get_logger("client").warning("cannot read from %s: %s", self._replica_of(fault.lease), fault.error)
            return self.post(PlanFailed(fault.error, fault.lease))
        except TensorHubError as error:
            return self.post(PlanFailed(error))
        # Sources of our own layout hold the same bytes: what came from one counts whatever the others are.
        key = tuple((source.layout, source.sums) for source in state.sources[: 1 if plan.raw else None])
        self._announcing.begin()
        if not keep or key != self._plan_key or any(source.partial for source in state.sources):
            self._verified = self._still_right(accesses[0]) if keep and plan.raw else None
            self._own, self._progress.figures = None, (0, 0)
        elif self._plan is not None and self._verified is not None:
            self._verified = carried_over(self._plan, self._verified, plan)
        self._progress.figures = (0, self._progress.figures[1])  # the reads of this plan have other numbers
        self._accesses, self._plan, self._plan_key = accesses, plan, key
        self._follow_with(plan)
        self._progress.replicas = {access.lease: access.replica for access in accesses}
        self.post(Planned(plan.casts or any(access.converted for access in accesses)))

    def _follow_with(self, plan: ReadPlan) -> None:
        """Let others follow what is derived by a plan, if it is offered before it is complete."""
        if plan.raw or not (self._state.offer and self._state.prefix):
            self._own = None
        elif self._own is None:
            self._own = Progressive(self._parts.memory, plan)
        else:
            self._own.replan(plan)

    def _plan_of(self, own: Layout, table: SegmentTable, accesses: Sequence[SourceAccess]) -> ReadPlan:
        """Plan to read no more than is needed."""
        return self._parts.book.plan(own, table, accesses, self._exact(accesses))

    def _exact(self, accesses: Sequence[SourceAccess]) -> list[ExactPolicy | None]:
        """Return when parts of segments are read: never from sources that do not vouch for less than whole ones."""
        policy, state, today = self._parts.exactness.policy, self._state, self._sources_today()
        whole = {lease for lease, source in today.items() if content(source) in state.inexact}
        return [None if access.lease in whole else policy for access in accesses]

    def _sources_today(self) -> dict[str, Source]:
        """Return the leased sources by the leases under which the running read knows them."""
        return {lease_of(self._state, source.lease): source for source in self._state.sources}

    def _unvouched(self, lease: str, kind: str, detail: str) -> None:
        name = self._progress.replicas.get(lease, "a source")
        get_logger("client").warning("%s gives no checksums of parts (%s): %s", name, kind, detail)
        self.post(Unvouched(lease, kind, detail))

    def _ask_sums(self) -> None:
        """Ask for checksums of cuts, as far as it is time to."""
        if self._state.phase is Phase.READING:
            leases = {lease: source.lease for lease, source in self._sources_today().items()}
            self._asker.turn(leases, self.life)

    def _still_right(self, access: SourceAccess) -> NDArray[np.bool_] | None:
        """Return which segments of ours are right by the checksums of a source of our layout, bool [segments]."""
        if self._plan is None or self._verified is None:
            return None
        sums = self._accesses[0].sums if self._plan.raw else None
        return right_by(access, self._verified, sums, self._own)

    def _hear_sums(self, lease: str, handle: ReadHandle | None = None) -> None:
        """Take in what was heard of the checksums of a source without a manifest, and tell the running read."""
        today = self._sources_today().get(lease)
        known = b"" if today is None else self._state.known.get(today.lease, b"")
        for number, access in enumerate(self._accesses):
            more = with_sums(access, known) if access.lease == lease else access
            if more is not access and handle is not None:
                assert access.known is not None
                handle.know(lease, access.known, more.sums[access.known : more.known])
            self._accesses[number] = more

    def _replica_of(self, lease: str) -> str:
        return next((source.replica for source in self._state.sources if source.lease == lease), "a source")

    def _length_of(self, lease: str) -> int:
        return next((len(access.sums) for access in self._accesses if access.lease == lease), 0)

    def _read(self) -> None:
        memory, plan = self._parts.memory, self._plan
        assert plan is not None
        if not self._collected:
            # What no read fills (padding outside of every box) has to come through a shadow unchanged.
            memory.collect()
            self._collected = True
        self._show(plan)
        for lease in [access.lease for access in self._accesses]:
            self._hear_sums(lease)
        self._accesses = [self._readable(access) for access in self._accesses]
        into = Destination(memory.layout, memory.table, memory.addresses, memory.devices, memory.buffers, memory.page)
        self._handle = self._parts.executor.start(plan, self._accesses, into, self._verified, self._progress)
        if self._parts.exactness.ask:
            self._asker.begin(plan, self._accesses, self._sources_today(), self._verified, self._handle)
            self._ask_sums()

    def _show(self, plan: ReadPlan | None) -> None:
        """Let followers see how far the read by a plan comes, if they verify it by a manifest; not what was before."""
        raw = plan is not None and plan.raw and not any(source.partial for source in self._state.sources)
        seen = raw and self._state.offer and self._state.prefix
        self._progress.show(self._parts.memory.page, tag_of(self._state.sources[0].sums) if seen else None)

    def _readable(self, access: SourceAccess) -> SourceAccess:
        """Return the access with as much to read as is known by now: sources go on filling while others plan."""
        state, length = self._state, len(access.sums)
        prefix = length if access.lease in state.whole else min(length, state.prefixes.get(access.lease, 0))
        return dataclasses.replace(access, prefix=max(access.prefix, prefix))

    def _note(self, outcome: ReadOutcome) -> ReadOutcome:
        """Take over the outcome of a read job."""
        self._handle = None
        self._asker.end()
        counters = self._parts.counters
        if len(outcome.verified):
            fresh = outcome.verified if self._verified is None else outcome.verified & ~self._verified
            assert self._plan is not None
            counters.bytes_read += int(self._plan.length_bytes[fresh].sum())
            self._verified = outcome.verified
        counters.rereads += outcome.rereads
        counters.fences += int(outcome.fenced)
        for lease in outcome.corrupt:
            text = "%s gave wrong bytes, which another source gave right"
            get_logger("client").warning(text, self._replica_of(lease))
        if outcome.end is ReadEnd.SOURCE_FAILED:
            counters.failovers += 1
            # Whether its lease still stood, so that it is to blame, only the server knows (law L4): it logs that.
            text = "%s is read no more (%s: %s)"
            get_logger("client").warning(text, self._replica_of(outcome.lease), outcome.kind, outcome.detail)
        return outcome

    def _announce(self) -> None:
        """Tell the server how much is verified, not too often."""
        now = time.monotonic()
        plan, (prefix, done_bytes) = self._plan, self._progress.figures
        if plan is None or not self._state.entered:
            return
        own = self._own
        if own is not None:
            own.fill(prefix)
            prefix = own.count
        elif not (plan.raw and self._state.offer and self._state.prefix):
            prefix = 0
        if self._announcing.is_due((prefix, done_bytes), self.life, now, self._progress.shown is not None):
            before = self._announcing.told[0]
            sums = b"" if own is None else own.packed(before, MOST_CUTS)
            prefix = prefix if own is None else before + len(sums) // 8
            answer = self._announcing.note((prefix, done_bytes), self.life, now)
            with contextlib.suppress(TensorHubError):  # the session is over; whoever needs an answer hears of it
                announcement = Announce(self._state.number, prefix, done_bytes, sums)
                self._parts.wire.submit(announcement, answer, life=self.life)

    def _settle(self) -> bytes:
        memory, plan = self._parts.memory, self._plan
        assert plan is not None
        memory.spread()
        sums = self._accesses[0].sums if plan.raw else memory.sums() if self._own is None else self._own.finish()
        blob = pack_sums(sums)
        self.sums = PutBlob(digest_of(blob), blob)
        return self.sums.digest
