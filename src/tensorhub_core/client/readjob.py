"""What a running read job shares between the executor thread, the verifier and the worker: orders, results, the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.awaiting import Bell
from tensorhub_core.client.reading import Destination, ReadObserver, ReadOutcome, SourceAccess
from tensorhub_core.client.transfers import Schedule
from tensorhub_core.client.verifier import Checked, Checker
from tensorhub_core.layout.read_plan import ReadPlan

_AT_ONCE = 1 << 16


class ReadJob:
    """One read job; also the `ReadHandle` that the worker steers it by."""

    def __init__(
        self,
        plan: ReadPlan,
        sources: Sequence[SourceAccess],
        destination: Destination,
        verified: NDArray[np.bool_],
        observer: ReadObserver,
        schedule: Schedule,
        checker: Checker,
    ) -> None:
        self.plan = plan
        self.sources = tuple(sources)
        self.destination = destination
        self.verified = verified
        self.observer = observer
        self.schedule = schedule
        self.checker = checker
        self.cancelled = False
        self._lock = threading.RLock()
        """Guards everything below. It is entered in one step: no interruption leaves it held, as a condition is."""
        self.changed = threading.Condition(self._lock)
        """Notified whenever an order or a result comes in."""
        self._leaves = 0
        self._allowed = [source.prefix for source in sources]
        self._lost: dict[int, tuple[str, str]] = {}
        self._checked: list[Checked] = []
        self._over = Bell()
        self._outcome: ReadOutcome | None = None
        self._error: Exception | None = None

    def advance(self, lease: str, prefix: int) -> None:
        """Allow reading up to `prefix` segments of the source; never takes leave back."""
        with self._lock:
            for number, source in enumerate(self.sources):
                if source.lease == lease:
                    self._allowed[number] = max(self._allowed[number], prefix)
            self._leaves += 1
            self.changed.notify_all()

    def know(self, lease: str, first: int, sums: NDArray[np.uint64]) -> None:
        """Hear the checksums of some cuts of the source."""
        with self._lock:
            for number, source in enumerate(self.sources):
                if source.lease == lease and first >= 0:
                    self.checker.know(number, first, sums)
            self._leaves += 1
            self.changed.notify_all()

    def fail(self, lease: str, reason: str, kind: str = "lost") -> None:
        """Stop reading a source that the server says is lost, or too slow."""
        with self._lock:
            for number, source in enumerate(self.sources):
                if source.lease == lease:
                    self._lost.setdefault(number, (kind, reason))
            self.changed.notify_all()

    def cancel(self) -> None:
        """Stop the job as soon as possible."""
        with self._lock:
            self.cancelled = True
            self.changed.notify_all()

    def wait(self, timeout_s: float) -> ReadOutcome | None:
        """Return the outcome, or None if the job still runs after `timeout_s`.

        Raises what broke the job if that was neither a source nor the worker: the destination is then no safer than
        the error says.
        """
        self._over.wait_for(lambda: self._outcome is not None or self._error is not None, timeout_s)
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._outcome

    # What follows is for the executor thread, but for `deliver`, which the verifier calls.

    def allowed(self, source: int) -> int:
        """Return how many segments of a source may be read now."""
        with self._lock:
            return self._allowed[source]

    @property
    def leaves(self) -> int:
        """Return how often leave to read more has come in."""
        with self._lock:
            return self._leaves

    def readable(self, source: int, begin: int, end: int) -> tuple[int, int]:
        """Return the first of the reads `begin..end` of the schedule that may be posted to a source now, as a span.

        The source has them, and their checksums are known as far as they are to be compared. Empty if there are none.
        """
        with self._lock:
            allowed = self._allowed[source]
            waits = allowed < len(self.sources[source].sums)
            while begin < end:
                stop = min(begin + _AT_ONCE, end)
                late = self.checker.unknown[begin:stop]
                if waits:
                    late = late | (self.schedule.segment[begin:stop] >= allowed)
                first = int(late.argmin())
                if not late[first]:
                    rest = late[first:]
                    return begin + first, begin + first + int(rest.argmax()) if rest.any() else stop
                begin = stop
            return end, end

    def lost(self) -> tuple[int, str, str] | None:
        """Return a source that `fail` named, the kind of its failure, and why."""
        with self._lock:
            return next(((source, *why) for source, why in self._lost.items()), None)

    def deliver(self, checked: Checked) -> None:
        """Hand over what the verifier found."""
        with self._lock:
            self._checked.append(checked)
            self.changed.notify_all()

    def take_checked(self) -> list[Checked]:
        """Return what the verifier has found since the last call."""
        with self._lock:
            checked, self._checked = self._checked, []
            return checked

    def idle(self, timeout_s: float, leaves: int) -> None:
        """Wait for an order, a result or more leave than `leaves`, but no longer than `timeout_s`."""
        with self._lock:
            if not self._checked and not self.cancelled and not self._lost and self._leaves == leaves:
                self.changed.wait(timeout_s)

    def finish(self, outcome: ReadOutcome | None, error: Exception | None = None) -> None:
        """Deliver the end."""
        with self._lock:
            self._outcome, self._error = outcome, error
        self._over.ring()
