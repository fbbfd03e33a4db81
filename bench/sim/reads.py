"""One reader's read: bytes come from one or several sources, from each as far as it may be read by now."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.assumptions import Assumptions
from bench.sim.events import Events, Timer
from bench.sim.links import Flow, Link, Network
from bench.sim.shapes import Shape

_MOST_PAUSE_S = 0.05
"""Rates change: so often it is looked again."""
_MOST_LOOKS = 1000
"""At a copy, while it comes."""
_EPSILON = 0.5
"""Bytes: less is rounding."""


@dataclass(eq=False)
class Part:
    """What comes from one source: nothing beyond its first `limit` bytes."""

    links: tuple[Link, ...]
    limit: float
    latency_s: float = 0.0
    flow: Flow | None = None
    gone: bool = False


@dataclass(eq=False)
class Read:
    """Fill `total` bytes in order; `done` of them are here at `since_s`. `ended()` is called when all are."""

    events: Events
    network: Network
    total: float
    ended: Callable[[], None]
    done: float = 0.0
    parts: dict[str, Part] = field(default_factory=dict)
    since_s: float = 0.0
    over: bool = False
    moved: Callable[[], None] = lambda: None
    """Called when it begins to move again after it had nothing to do."""
    _timer: Timer | None = None
    _planned_rate: float = 0.0
    _due_s: float = 0.0

    def add(self, name: str, links: tuple[Link, ...], limit: float) -> None:
        """Add a source, before `begin`."""
        self.parts[name] = Part(links, min(limit, self.total))

    def begin(self) -> None:
        """Let bytes flow."""
        self.since_s = self.events.now
        self._review()

    def advance(self, name: str, limit: float) -> None:
        """Allow more of a source to be read."""
        part = self.parts.get(name)
        if part is None or self.over or limit <= part.limit:
            return
        part.limit = min(limit, self.total)
        if part.flow is None:
            self._review()
        else:
            self._plan()

    def lose(self, name: str) -> None:
        """Let nothing come from a source any more."""
        part = self.parts.get(name)
        if part is not None and not self.over:
            part.gone = True
            self._review()

    def stop(self) -> None:
        """End the read as it is."""
        if not self.over:
            self.count()
            self._close()

    def count(self) -> float:
        """Count what has come by now; returns it."""
        now = self.events.now
        if now > self.since_s:
            elapsed = now - self.since_s
            self.since_s = now
            for part in self.parts.values():
                if part.flow is not None:
                    here = part.flow.rate * elapsed
                    self.done += here
                    for link in part.links:
                        link.carried_bytes += here
            self.done = min(self.done, self.total)
        return self.done

    @property
    def rate(self) -> float:
        """Return the bytes per second that come at the moment."""
        return sum(part.flow.rate for part in self.parts.values() if part.flow is not None)

    def _review(self) -> None:
        """See which sources can give something now."""
        self.count()
        if self.done >= self.total - _EPSILON:
            self.done = self.total
            self._close()
            return self.ended()
        rested = all(part.flow is None for part in self.parts.values())
        for part in self.parts.values():
            gives = not part.gone and part.limit > self.done + _EPSILON
            if gives and part.flow is None:
                part.flow = Flow(part.links, self._changing, self._changed)
                self.network.add(part.flow)
            elif not gives and part.flow is not None:
                self.network.remove(part.flow)
                part.flow = None
        self._plan()
        if rested and any(part.flow is not None for part in self.parts.values()):
            self.moved()

    def _changing(self) -> None:
        self.count()

    def _changed(self) -> None:
        if self._timer is None or abs(self.rate - self._planned_rate) > 1e-9 * self._planned_rate:
            self._plan()  # else the sources have only changed places

    def _plan(self) -> None:
        """Be called again when there is something to decide, or before: then it is seen how much longer it takes."""
        if self.over:
            return
        self.count()
        rate = self._planned_rate = self.rate
        limits = [part.limit for part in self.parts.values() if part.flow is not None]
        left = min(self.total, *limits) - self.done if limits else 0.0
        due_s = self.events.now + max(0.0, left) / rate if rate > 0 else math.inf
        if self._timer is not None:
            if self._due_s <= due_s < math.inf:
                return
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf:
            self._timer, self._due_s = self.events.at(due_s, self._reach), due_s

    def _reach(self) -> None:
        self._timer = None
        self.count()
        limits = [part.limit for part in self.parts.values() if part.flow is not None]
        target = min([self.total, *limits])
        if abs(self.done - target) <= _EPSILON + 1e-9 * self.total:  # rounding of times
            self.done = target
        self._review()

    def _close(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        for part in self.parts.values():
            if part.flow is not None:
                self.network.remove(part.flow)
                part.flow = None


def pause_between(assumptions: Assumptions, read: Read, shape: Shape, seen: int | None) -> float:
    """Return how long nothing changes for whoever looks at a read: followers, if `seen` segments are, or the worker.

    What takes minutes is looked at more coarsely than it would be, at our expense.
    """
    direct_s = assumptions.direct_s.value
    if not direct_s or seen is None:
        return assumptions.poll_s.value
    if not read.rate:
        return direct_s
    step_s = max(direct_s, shape.total_bytes / read.rate / _MOST_LOOKS)
    missing = (seen + 1) * shape.segment_bytes + assumptions.flight_bytes(read.rate) - read.count()
    return min(step_s * max(1, math.ceil(missing / read.rate / step_s)), max(step_s, _MOST_PAUSE_S))
