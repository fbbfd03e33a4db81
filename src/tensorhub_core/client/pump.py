"""Run one read job: keep a bounded window of batches in flight, have what lands verified, leave a source that fails.

Whatever ends a job early, all its reads are closed, and the transport is fenced if one of them was not quiet, before
the outcome is delivered (law L9).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tensorhub_core.client.flow import Flow, FlowSettings
from tensorhub_core.client.peers import AttachedPeer, Peers
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.client.staging import Staging
from tensorhub_core.client.transfers import Part
from tensorhub_core.client.verifier import Checked, Landed, Verifier
from tensorhub_core.clock import Clock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, Progress, ReadId, ReadState, Transport

MOST_RUNS = 256
_POLL_PAUSE_S = 50e-6
_ORDER_PAUSE_S = 0.05
_VERIFY_TIMEOUT_S = 60.0
_PAUSE_SHARE = 0.5


class _SourceFailed(Exception):
    """A source cannot be read on: `kind` is that of a `LeaseFailure`."""

    def __init__(self, source: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.source, self.kind, self.detail = source, kind, detail


class _Cancelled(Exception):
    """The worker wants the job to end."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch that was posted."""

    read: ReadId
    part: Part
    source: int
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
        self._flows = [Flow(flow) for _ in job.sources]
        self._attached: list[AttachedPeer | None] = [None] * len(job.sources)
        self._todo: list[tuple[int, int]] = [(0, len(job.schedule))] if len(job.schedule) else []
        self._offset_bytes = 0
        """How much of the first read to do is posted already."""
        self._slot = -1
        self._missing: dict[int, int] = {}
        """Bytes that have not landed yet of reads that were posted in parts."""
        self._flights: list[_Flight] = []
        self._checking = 0
        self._unverified_bytes = 0
        self._read_again: set[int] = set()
        self._unquiet = False
        self._prefix = 0
        self._done_bytes = int(job.plan.length_bytes[job.verified].sum())

    def run(self) -> ReadOutcome:
        """Read until all is verified, a source fails or the worker cancels; raises what is nobody's fault here."""
        try:
            self._prepare()
            self._loop()
        except _Cancelled:
            return self._outcome(ReadEnd.CANCELLED, self._wind_down())
        except _SourceFailed as failed:
            fenced = self._wind_down()
            source = self._job.sources[failed.source]
            self._peers.drop(source.description)
            return self._outcome(ReadEnd.SOURCE_FAILED, fenced, source.lease, failed.kind, failed.detail)
        except Exception:
            self._wind_down()
            raise
        return self._outcome(ReadEnd.VERIFIED, False)

    def _prepare(self) -> None:
        self._peers.trim()
        largest = self._schedule.largest_staged_bytes
        if largest:
            try:
                self._staging.prepare(max(largest, self._settings.chunk_bytes))
            except TransportError:
                self._peers.forget_all()
                raise
        self._report("")

    def _loop(self) -> None:
        last = self._clock.now()
        while True:
            now = self._clock.now()
            if now - last > _PAUSE_SHARE * self._settings.stall_timeout_s:
                for flow in self._flows:
                    flow.paused(now)
            last = now
            moved = self._collect()
            moved = self._poll() or moved
            self._obey()
            if not self._todo and not self._flights and not self._checking:
                return
            moved = self._fill() or moved
            self._watch()
            if not moved:
                self._rest()

    def _obey(self) -> None:
        if self._job.cancelled:
            raise _Cancelled
        lost = self._job.lost()
        if lost is not None:
            raise _SourceFailed(lost[0], "lost", lost[1])

    def _rest(self) -> None:
        if self._flights:
            time.sleep(_POLL_PAUSE_S)
        else:
            self._job.idle(_ORDER_PAUSE_S)

    def _watch(self) -> None:
        now = self._clock.now()
        for source, flow in enumerate(self._flows):
            reason = flow.stalled(now)
            if reason:
                raise self._failed(source, "stalled", reason)

    # --- posting ----------------------------------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Post batches in plan order as long as there is room; returns whether any was."""
        any_posted = False
        window = 2 * self._settings.window
        most_bytes = window * self._settings.chunk_bytes
        while self._todo and self._checking < window and self._unverified_bytes < most_bytes:
            part = self._next_part()
            if part is None:
                break
            self._post(part)
            any_posted = True
        return any_posted

    def _next_part(self) -> Part | None:
        """Return the next batch that may be read now and has a place to land."""
        begin, end = self._todo[0]
        source = int(self._schedule.source[begin])
        room = self._flows[source].room_bytes()
        if not room:
            return None
        if self._schedule.staged[begin]:
            if not self._offset_bytes:
                slot = self._staging.take() if self._slot < 0 else self._slot
                if slot is None:
                    return None
                self._slot = slot
            room = min(room, self._staging.slot_bytes)
        part = self._schedule.cut(begin, end, self._offset_bytes, room, MOST_RUNS)
        beyond = self._schedule.segment[part.begin : part.end] >= self._job.allowed(source)
        if beyond.any():
            readable = int(beyond.argmax())
            return self._schedule.cut(begin, begin + readable, 0, room, MOST_RUNS) if readable else None
        return part

    def _post(self, part: Part) -> None:
        source = int(self._schedule.source[part.begin])
        staged = bool(self._schedule.staged[part.begin])
        peer = self._attach(source)
        runs = self._schedule.runs(part)
        base = np.uint64(self._staging.slot(self._slot).ctypes.data if staged else 0)
        devices = self._schedule.devices
        batch = Batch(
            runs.local + base,
            runs.remote,
            runs.length_bytes,
            devices[self._schedule.local_device[part.begin]],
            devices[self._schedule.remote_device[part.begin]],
        )
        now = self._clock.now()
        try:
            read = self._transport.post(peer.peer, batch)
        except TransportError as error:
            raise self._failed(source, "lost", str(error)) from None
        flight = _Flight(read, part, source, self._slot if staged else -1, now)
        self._flights.append(flight)
        self._unverified_bytes += part.length_bytes
        self._flows[source].posted(part.length_bytes, now)
        self._advance(part)
        # Where posting moves the bytes itself, they can be verified while the next batch is posted.
        self._examine(flight, self._transport.poll(read))

    def _advance(self, part: Part) -> None:
        """Move the place from which the next batch is cut."""
        whole = int(self._schedule.length_bytes[part.begin : part.end].sum())
        if part.length_bytes < whole:
            self._missing.setdefault(part.begin, whole)
            self._offset_bytes = part.offset_bytes + part.length_bytes
            if self._offset_bytes < whole:
                return
        self._offset_bytes = 0
        if self._schedule.staged[part.begin]:
            self._slot = -1
        _, end = self._todo.pop(0)
        if part.end < end:
            self._todo.insert(0, (part.end, end))

    def _attach(self, source: int) -> AttachedPeer:
        peer = self._attached[source]
        if peer is None:
            try:
                peer = self._peers.attach(self._job.sources[source].description)
            except TransportError as error:
                raise _SourceFailed(source, "unreachable", str(error)) from None
            self._attached[source] = peer
        return peer

    # --- landing ----------------------------------------------------------------------------------------------------

    def _poll(self) -> bool:
        """Look at every batch in flight; returns whether one has landed."""
        before = len(self._flights)
        for flight in list(self._flights):
            self._examine(flight, self._transport.poll(flight.read))
        return len(self._flights) < before

    def _examine(self, flight: _Flight, progress: Progress) -> None:
        if progress.state is ReadState.ACTIVE:
            return
        if progress.state is ReadState.FAILED:
            raise self._failed(flight.source, "lost", progress.error)
        self._flights.remove(flight)
        if not self._transport.close(flight.read):
            self._unquiet = True
            raise self._failed(flight.source, "lost", "a read was reported done, and then that it may still write")
        self._flows[flight.source].ended(flight.part.length_bytes, flight.posted_s, self._clock.now())
        attached = self._attached[flight.source]
        if attached is not None:
            attached.proven = True
        self._landed(flight)

    def _landed(self, flight: _Flight) -> None:
        part = flight.part
        if part.begin in self._missing:
            self._missing[part.begin] -= part.length_bytes
            if self._missing[part.begin]:
                return
            del self._missing[part.begin]
        slot = self._staging.slot(flight.slot) if flight.slot >= 0 else None
        self._checking += 1
        landed = Landed(part.begin, part.end, slot, flight.slot)
        self._verifier.submit(self._job.checker, landed, self._job.deliver)

    def _failed(self, source: int, kind: str, detail: str) -> _SourceFailed:
        """Name the failure of a source: one that never gave a byte cannot be reached from here."""
        attached = self._attached[source]
        proven = attached is not None and attached.proven
        return _SourceFailed(source, kind if proven else "unreachable", detail)

    # --- verified ---------------------------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Take in what the verifier found; returns whether anything was."""
        found = self._job.take_checked()
        for checked in found:
            self._count(checked)
        if found:
            first = found[-1].landed.begin
            self._report(self._job.sources[int(self._schedule.source[first])].lease)
        for checked in found:
            if checked.error is not None:
                raise checked.error
            for index in (checked.landed.begin + np.flatnonzero(~checked.right)).tolist():
                self._again(index)
        return bool(found)

    def _count(self, checked: Checked) -> None:
        landed = checked.landed
        self._checking -= 1
        lengths = self._schedule.length_bytes[landed.begin : landed.end]
        self._unverified_bytes -= int(lengths.sum())
        if landed.slot_number >= 0:
            self._staging.give_back(landed.slot_number)
        self._job.verified[self._schedule.read[landed.begin : landed.end][checked.right]] = True
        self._done_bytes += int(lengths[checked.right].sum())

    def _again(self, index: int) -> None:
        """Read a segment again whose checksum did not match, once."""
        source = int(self._schedule.source[index])
        if index in self._read_again:
            segment = int(self._schedule.segment[index])
            raise _SourceFailed(source, "corrupt", f"segment {segment} does not match its checksum, also read again")
        self._read_again.add(index)
        # A read that is half posted comes first.
        self._todo.insert(1 if self._offset_bytes else 0, (index, index + 1))

    def _report(self, lease: str) -> None:
        verified = self._job.verified
        if self._prefix < len(verified):
            rest = verified[self._prefix :]
            self._prefix += int(rest.argmin()) if not rest.all() else len(rest)
        self._job.observer.on_progress(self._prefix, self._done_bytes, self._job.plan.total_bytes, lease)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _wind_down(self) -> bool:
        """Close all reads, fence if one was not quiet, let the verifier finish; returns whether it fenced.

        Raises TransportError if the fence failed: bytes may then still land.
        """
        for flight in self._flights:
            self._unquiet = not self._transport.close(flight.read) or self._unquiet
        self._flights.clear()
        if self._unquiet:
            self._fence()
        end = time.monotonic() + _VERIFY_TIMEOUT_S
        while self._checking:
            for checked in self._job.take_checked():
                self._count(checked)
            if self._checking:
                if time.monotonic() > end:
                    self.poisoned = TransportError("the verifying thread does not end")
                    raise self.poisoned
                time.sleep(_POLL_PAUSE_S)
        self._report("")
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
        again = len(self._read_again)
        return ReadOutcome(end, self._job.verified, self._done_bytes, lease, kind, detail, fenced, again)
