"""Run one read job: keep a bounded window of batches in flight, have what lands verified, leave a source that fails.

Whatever ends a job early, all its reads are closed, and the transport is fenced if one of them was not quiet, before
the outcome is delivered (law L9).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tensorhub_core.client.account import Account
from tensorhub_core.client.backlog import Backlog
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.lanes import Lane, Lanes, SourceFailed
from tensorhub_core.client.looking import Looks
from tensorhub_core.client.peers import AttachedPeer, Peers
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.client.staging import Staging
from tensorhub_core.client.transfers import Part
from tensorhub_core.client.verifier import Checked, Landed, Verifier
from tensorhub_core.clock import Clock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, Progress, ReadId, ReadState, Transport
from tensorhub_core.transport.description import with_places

MOST_RUNS = 1024
_POLL_PAUSE_S = 50e-6
_MOST_PAUSE_S = 1e-3
_ORDER_PAUSE_S = 0.05
_VERIFY_TIMEOUT_S = 60.0
_PAUSE_SHARE = 0.5
_LAND_S = 0.5
"""When a source fails, what the others have on its way may land for so long: it need not be read again then."""


class _Cancelled(Exception):
    """The worker wants the job to end."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch that was posted."""

    read: ReadId
    part: Part
    lane: Lane
    slot: int
    posted_s: float


class Pump:
    """One run of one job; on the executor thread."""

    def __init__(
        self,
        job: ReadJob,
        transport: Transport,
        peers: Peers,
        staging: Staging,
        verifier: Verifier,
        flow: FlowSettings,
        clock: Clock,
    ) -> None:
        self.poisoned: Exception | None = None
        """Why the reading side cannot be used any more: it could not be fenced."""
        self._job, self._schedule = job, job.schedule
        self._transport, self._peers, self._staging, self._verifier = transport, peers, staging, verifier
        self._settings, self._clock = flow, clock
        self._lanes = Lanes(job.sources, flow, job.plan.raw)
        self._backlog = Backlog(job.schedule)
        self._flights: list[_Flight] = []
        self._account = Account(job, self._lanes, self._backlog)
        self._looks = Looks(job, transport, self._lanes, flow.stall_timeout_s)
        self._unquiet = False
        self._pause_s = _POLL_PAUSE_S
        self._idle = False
        """No source has anything here that could be moved now."""

    def run(self) -> ReadOutcome:
        """Read until all is verified, a source fails or the worker cancels; raises what is nobody's fault here."""
        try:
            self._prepare()
            self._loop()
        except _Cancelled:
            return self._outcome(ReadEnd.CANCELLED, self._wind_down())
        except SourceFailed as failed:
            self._let_land(failed.source)
            fenced = self._wind_down()
            source = self._job.sources[failed.source]
            self._peers.drop(source.description)
            detail = with_places(failed.detail, source.description) if failed.kind == "unreachable" else failed.detail
            return self._outcome(ReadEnd.SOURCE_FAILED, fenced, source.lease, failed.kind, detail)
        except Exception:
            self._wind_down()
            raise
        self._looks.let_land(_LAND_S)
        return self._outcome(ReadEnd.VERIFIED, self._quieten())

    def _prepare(self) -> None:
        self._peers.trim()
        largest = self._schedule.largest_staged_bytes
        if largest:
            try:
                self._staging.prepare(max(largest, self._settings.chunk_bytes))
            except TransportError:
                self._peers.doubt_all()
                raise
        self._account.report("")

    def _loop(self) -> None:
        last = self._clock.now()
        while True:
            moved = self._collect()
            moved = self._poll() or moved
            self._obey()
            if not self._backlog and not self._flights and not self._account.checking:
                return
            leaves = self._job.leaves
            moved = self._fill() or moved
            # Here, because the caller's progress callback may have taken its time since sources were last watched.
            now = self._clock.now()
            if now - last > _PAUSE_SHARE * self._settings.stall_timeout_s:
                self._lanes.paused(now)
                self._looks.paused(now)
            last = now
            self._lanes.watch(self._backlog, self._account.checking, now)
            moved = self._looks.turn(self._backlog, self._lanes.working, self._attach, now) or moved
            if not moved:
                self._rest(leaves)
            else:
                self._pause_s = _POLL_PAUSE_S

    def _obey(self) -> None:
        if self._job.cancelled:
            raise _Cancelled
        lost = self._job.lost()
        if lost is not None:
            raise SourceFailed(*lost)

    def _rest(self, leaves: int) -> None:
        """Check something if there is nothing else to do, or wait, also for more leave than `leaves`."""
        idle = self._idle or not self._flights or self._pause_s >= _MOST_PAUSE_S
        if idle and self._account.checking and self._verifier.help():
            return
        firsts = {**self._looks.reads, **{flight.lane.source: flight.read for flight in reversed(self._flights)}}
        if firsts:
            # Longer and longer, up to what a batch of a slow link takes a tenth of: polling it costs a CPU otherwise.
            self._transport.wait(list(firsts.values()), self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
        else:
            self._job.idle(min(_ORDER_PAUSE_S, self._looks.wait_s(self._clock.now())), leaves)

    # --- posting ----------------------------------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Post batches as long as there is room, one of each source in turn; returns whether any was.

        A read that was begun goes on whatever the room: only when all of it has landed is it verified and makes room.
        """
        any_posted = posted = False
        window = 2 * self._settings.window
        most_bytes = len(self._lanes) * window * self._settings.chunk_bytes
        while True:
            for lane in self._lanes.all:
                if not self._backlog:
                    return any_posted
                full = self._account.checking >= window or self._account.unverified_bytes >= most_bytes
                waits = lane.left or (full and not self._backlog.is_half(lane.source))
                part = None if waits else self._next_part(lane)
                if part is not None:
                    self._post(lane, part)
                    any_posted = posted = True
                    self._looks.posted(lane, self._backlog, self._lanes.working, self._clock.now())
                    # Where posting moves the bytes itself, followers would see nothing until the window is full.
                    self._collect()
            if not posted:
                return any_posted
            posted = False

    def _next_part(self, lane: Lane) -> Part | None:
        """Return the next batch that a source may give now and that has a place to land."""
        room = lane.flow.room_bytes()
        span = lane.next_span(self._backlog, self._lanes.working, self._job) if room else None
        if span is None:
            if room:
                lane.flow.limited(self._clock.now())
            return None
        begin, end, offset = span
        staged = bool(self._schedule.staged[begin])
        if staged:
            room = min(room, self._staging.slot_bytes)
        part = self._schedule.next_part(lane.source, begin, end, offset, room, MOST_RUNS)
        if not offset and not self._is_worthwhile(lane, part):
            return None
        if staged and lane.slot < 0:
            slot = self._staging.take()
            if slot is None:
                return None
            lane.slot = slot
        return part

    def _is_worthwhile(self, lane: Lane, part: Part) -> bool:
        """Tell whether to ask a source for a batch that others could give as well."""
        if not self._lanes.shared or part.begin in self._backlog.wrong:
            return True
        segment = int(self._schedule.segment[part.begin])
        others = [other for other in self._lanes.all if self._job.allowed(other.source) > segment]
        left_bytes = self._backlog.left_bytes
        return self._lanes.is_worthwhile(lane, others, part.length_bytes, left_bytes, self._clock.now())

    def _post(self, lane: Lane, part: Part) -> None:
        staged = bool(self._schedule.staged[part.begin])
        peer = self._attach(lane)
        runs = self._schedule.runs(lane.source, part)
        base = np.uint64(self._staging.slot(lane.slot).ctypes.data if staged else 0)
        devices = self._schedule.devices_of(lane.source, part.begin)
        batch = Batch(runs.local + base, runs.remote, runs.length_bytes, *devices)
        now = self._clock.now()
        try:
            read = self._transport.post(peer.peer, batch)
        except TransportError as error:
            raise lane.failed("lost", str(error)) from None
        flight = _Flight(read, part, lane, lane.slot if staged else -1, now)
        self._flights.append(flight)
        self._account.unverified_bytes += part.length_bytes
        lane.posted(part.length_bytes, now)
        self._backlog.posted(lane.source, part)
        if not self._backlog.is_half(lane.source):
            lane.slot = -1
        # Where posting moves the bytes itself, they can be verified while the next batch is posted.
        self._examine(flight, self._transport.poll(read))

    def _attach(self, lane: Lane) -> AttachedPeer:
        if lane.attached is None:
            try:
                lane.attached = self._peers.attach(self._job.sources[lane.source].description)
            except TransportError as error:
                raise SourceFailed(lane.source, "unreachable", str(error)) from None
        return lane.attached

    # --- landing ----------------------------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """Look at every batch in flight; returns whether one has landed."""
        before = len(self._flights)
        idle: set[int] = set()
        for flight in list(self._flights):
            if flight.lane.source in idle:
                continue  # nothing has arrived from that source
            progress = self._transport.poll(flight.read)
            if progress.idle:
                idle.add(flight.lane.source)
            self._examine(flight, progress)
        self._idle = all(flight.lane.source in idle for flight in self._flights)
        return len(self._flights) < before

    def _examine(self, flight: _Flight, progress: Progress) -> None:
        if progress.state is ReadState.ACTIVE:
            return
        lane, length_bytes = flight.lane, flight.part.length_bytes
        if progress.state is ReadState.FAILED:
            raise lane.failed("lost", progress.error)
        self._flights.remove(flight)
        if not self._transport.close(flight.read):
            self._unquiet = True
            raise lane.failed("lost", "a read was reported done, and then that it may still write")
        lane.ended(length_bytes, flight.posted_s, self._clock.now())
        if self._backlog.landed(flight.part):
            part = flight.part
            slot = self._staging.slot(flight.slot) if flight.slot >= 0 else None
            self._account.checking += 1
            landed = Landed(lane.source, part.begin, part.end, slot, flight.slot)
            self._verifier.submit(self._job.checker, landed, self._job.deliver)

    # --- verified ---------------------------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Take in what the verifier found; returns whether anything was."""
        found = self._job.take_checked()
        for checked in found:
            self._count(checked)
        if found:
            self._account.report(self._lanes.all[found[-1].landed.source].lease)
        for checked in found:
            if checked.error is not None:
                raise checked.error
            for index in (checked.landed.begin + np.flatnonzero(~checked.right)).tolist():
                self._account.wrong(self._lanes.all[checked.landed.source], index)
        return bool(found)

    def _count(self, checked: Checked) -> None:
        if checked.landed.slot_number >= 0:
            self._staging.give_back(checked.landed.slot_number)
        self._account.checked(checked)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _let_land(self, failed: int) -> None:
        """Let what other sources have on its way arrive, for a short time: a fence would throw it away."""
        end = time.monotonic() + _LAND_S
        try:
            while time.monotonic() < end:
                others = [each for each in self._flights if each.lane.source != failed and not each.lane.left]
                for flight in others:
                    self._examine(flight, self._transport.poll(flight.read))
                if not others:
                    return
                time.sleep(_POLL_PAUSE_S)
        except SourceFailed:
            return  # one that fails as well

    def _wind_down(self) -> bool:
        """Close all reads, fence if one was not quiet, let the verifier finish; returns whether it fenced.

        Raises TransportError if the fence failed: bytes may then still land.
        """
        self._quieten()
        end = time.monotonic() + _VERIFY_TIMEOUT_S
        while self._account.checking:
            for checked in self._job.take_checked():
                self._count(checked)
            if self._account.checking and not self._verifier.help():
                if time.monotonic() > end:
                    self.poisoned = TransportError("the verifying thread does not end")
                    raise self.poisoned
                time.sleep(_POLL_PAUSE_S)
        self._account.report("")
        return self._unquiet

    def _quieten(self) -> bool:
        """Close all that is in flight, fence if not all of it was quiet; returns whether it fenced."""
        for flight in self._flights:
            self._unquiet = not self._transport.close(flight.read) or self._unquiet
        self._flights.clear()
        self._unquiet = not self._looks.close() or self._unquiet
        if self._unquiet:
            self._fence()
        return self._unquiet

    def _fence(self) -> None:
        self._peers.forget_all()
        try:
            self._transport.fence()
        except Exception as error:
            self.poisoned = error
            raise TransportError(
                f"the reading side could not be fenced ({error}): bytes may still land in the registered memory, end "
                "this process"
            ) from error

    def _outcome(self, end: ReadEnd, fenced: bool, lease: str = "", kind: str = "", detail: str = "") -> ReadOutcome:
        account = self._account
        verified, done_bytes, corrupt = self._job.verified, account.done_bytes, tuple(sorted(account.corrupt))
        return ReadOutcome(end, verified, done_bytes, lease, kind, detail, fenced, account.rereads, corrupt)
