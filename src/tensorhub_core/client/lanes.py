"""Keep account of the sources of one read job: what each has in flight, who is still asked, who is given up; pure.

Time is an argument. Only sources of one raw plan are compared with each other: elsewhere each has its own share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from tensorhub_core.client.backlog import Backlog, Span
from tensorhub_core.client.flow import Flow, FlowSettings
from tensorhub_core.client.pace import Pace, patience_s, straggler, worthwhile
from tensorhub_core.client.peers import AttachedPeer
from tensorhub_core.client.reading import SourceAccess


class SourceFailed(Exception):
    """A source cannot be read on: `kind` is that of a `LeaseFailure`."""

    def __init__(self, source: int, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.source, self.kind, self.detail = source, kind, detail


class Leave(Protocol):
    """What may be read now (`readjob.ReadJob`); `leaves` grows whenever that becomes more."""

    @property
    def leaves(self) -> int:
        """Return how often it has become more."""

    def readable(self, source: int, begin: int, end: int) -> tuple[int, int]:
        """Return the first reads of `begin..end` that may be posted to a source."""


@dataclass(slots=True)
class Lane:
    """One source of a job. `left`: it is a straggler and gets no more work; `wrong` counts its wrong segments.

    `waiting`: no read before this one could be posted when the leave to read was last looked at, at its `leaves`.
    """

    source: int
    lease: str
    segments: int
    flow: Flow
    pace: Pace
    attached: AttachedPeer | None = None
    slot: int = -1
    flights: int = 0
    left: bool = False
    wrong: int = 0
    leaves: int = -1
    waiting: int = 0

    def next_span(self, backlog: Backlog, working: Collection[int], leave: Leave) -> Span | None:
        """Return the first reads that the source may give now; those that still have to wait are passed over."""
        urgent = backlog.urgent(self.source, working)
        if urgent is not None:
            begin, end, offset = urgent
            return urgent if offset or leave.readable(self.source, begin, end) == (begin, end) else None
        leaves = leave.leaves
        if self.leaves != leaves:
            self.leaves, self.waiting = leaves, 0
        for begin, end in backlog.fresh(self.source, self.waiting):
            found = leave.readable(self.source, begin, end)
            self.waiting = found[0]
            if found[0] < found[1]:
                return *found, 0
        return None

    def posted(self, length_bytes: int, now: float) -> None:
        """Count a batch that was posted."""
        self.flights += 1
        self.flow.posted(length_bytes, now)
        self.pace.posted(length_bytes, now)

    def ended(self, length_bytes: int, posted_s: float, now: float) -> None:
        """Count a batch that is done: the source has proven that it can be reached."""
        self.flights -= 1
        self.flow.ended(length_bytes, posted_s, now)
        self.pace.ended(length_bytes, now)
        if self.attached is not None:
            self.attached.proven = True

    def failed(self, kind: str, detail: str) -> SourceFailed:
        """Name a failure: a source that never gave a byte is out of reach, unless it was only slower than others."""
        proven = self.attached is not None and self.attached.proven
        return SourceFailed(self.source, kind if proven or kind == "slow" else "unreachable", detail)


class Lanes:
    """The sources of one job."""

    def __init__(self, sources: Sequence[SourceAccess], flow: FlowSettings, raw: bool) -> None:
        self.all = [
            Lane(number, source.lease, len(source.sums), Flow(flow), Pace()) for number, source in enumerate(sources)
        ]
        self.working = list(range(len(sources)))
        """Those that are still asked for more."""
        self.shared = raw and len(sources) > 1
        """Every source may give every segment."""
        self._near_end_bytes = len(sources) * flow.window * flow.chunk_bytes
        self._waits_since_s: float | None = None
        """Since when only stragglers keep the job from its end."""

    def __len__(self) -> int:
        return len(self.all)

    def paused(self, now: float) -> None:
        """Forget the time until now: this process did not run, so no source is to blame."""
        for lane in self.all:
            lane.flow.paused(now)
            lane.pace.paused(now)

    def watch(self, backlog: Backlog, checking: int, now: float) -> None:
        """Leave stragglers; raises SourceFailed for a source that has stalled or that is not worth waiting for."""
        for lane in self.all:
            reason = lane.flow.stalled(now)
            if reason:
                raise lane.failed("stalled", reason)
        if self.shared:
            self._leave_straggler(backlog, now)
            self._wait_for_stragglers(backlog, checking, now)

    def is_worthwhile(self, lane: Lane, others: Sequence[Lane], ask_bytes: int, left_bytes: int, now: float) -> bool:
        """Tell whether a source is to be asked for more, when `others` may be asked for the same."""
        if left_bytes > self._near_end_bytes:
            return True
        paces = [other.pace for other in others if other is not lane and not other.left]
        return worthwhile(lane.pace, paces, min(ask_bytes, left_bytes), left_bytes, now)

    def _leave_straggler(self, backlog: Backlog, now: float) -> None:
        slow = straggler([self.all[source].pace for source in self.working], now)
        if slow is not None:
            self.all[self.working.pop(slow)].left = True
        for lane in self.all:
            if lane.left and not lane.flights:
                backlog.give_back(lane.source)

    def _wait_for_stragglers(self, backlog: Backlog, checking: int, now: float) -> None:
        owing = [lane for lane in self.all if lane.left and lane.flights]
        others = [self.all[source] for source in self.working]
        if not owing or checking or backlog.has_work_for(self.working) or any(lane.flights for lane in others):
            self._waits_since_s = None
            return
        if self._waits_since_s is None:
            self._waits_since_s = now
        paces = [lane.pace for lane in others]
        if now - self._waits_since_s >= patience_s(sum(lane.pace.flying_bytes for lane in owing), paces, now):
            rates = owing[0].pace.rate(now), max(pace.rate(now) for pace in paces)
            raise owing[0].failed("slow", "{:,.0f} bytes/s when another one gives {:,.0f}".format(*rates))
