"""One reader's read: bytes come from one or several sources, from each as far as it may be read by now.

How far that is may grow all the time, where a reader follows one that reads itself: then the limit has a slope, and
the reader comes on as fast as its source, some time behind it. Nothing has to happen meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.events import Events, Timer
from bench.sim.links import Flow, Link, Network

_EPSILON = 0.5
"""Bytes: less is rounding."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(eq=False)
class Part:
    """What comes from one source: nothing beyond its first `limit` bytes, which become `slope` more every second.

    A reader stays at least `lag_s` behind a limit with a slope once it has come to it. `starved()` is called, once for
    each limit without a slope, when no more than comes in `early_s`, and no more than `early_bytes`, is left below it.
    """

    links: tuple[Link, ...]
    limit: float
    starved: Callable[[], None] = _nothing
    early_s: float = 0.0
    early_bytes: float = 0.0
    slope: float = 0.0
    lag_s: float = 0.0
    flow: Flow | None = None
    gone: bool = False
    told: bool = False
    """`starved()` was called for this limit."""

    @property
    def rides(self) -> bool:
        """Tell whether nothing is left but what its source brings."""
        return self.slope > 0 and not self.lag_s

    def spare_bytes(self, rate: float) -> float:
        """Return how much is left below the limit when it is said to be used up."""
        return 0.0 if self.told else min(rate * self.early_s, self.early_bytes)


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
    moved: Callable[[], None] = _nothing
    """Called when it comes on at another rate than before."""
    _timer: Timer | None = None
    _planned_rate: float = 0.0
    _due_s: float = 0.0
    _told_rate: float = 0.0

    def __post_init__(self) -> None:
        self._near = _EPSILON + 1e-9 * self.total

    def add(self, name: str, links: tuple[Link, ...], limit: float) -> Part:
        """Add a source, before `begin`."""
        part = self.parts[name] = Part(links, min(limit, self.total))
        return part

    def begin(self) -> None:
        """Let bytes flow."""
        self.since_s = self.events.now
        self._review()

    def advance(self, name: str, limit: float) -> None:
        """Allow more of a source to be read."""
        part = self.parts.get(name)
        if part is None or self.over:
            return
        self.count()
        if limit <= part.limit:
            return
        part.limit, part.told = min(limit, self.total), False
        if part.limit == self.total:
            part.slope = 0.0
        self._review()

    def follow(self, name: str, limit: float, slope: float, lag_s: float) -> None:
        """Allow more of a source, and ever more from now on."""
        part = self.parts[name]
        self.count()
        part.limit, part.told = max(part.limit, min(limit, self.total)), False
        part.slope, part.lag_s = slope, lag_s
        short = slope * lag_s - max(0.0, part.limit - self.done)
        if short > 0:  # it would have nothing to do again and again until it has fallen behind so far
            part.limit, part.lag_s = self.done - short, 0.0
        self._review()

    def slow_down(self, name: str, slope: float) -> None:
        """Let the limit of a source grow at another rate, 0 if it stands still now."""
        part = self.parts[name]
        self.count()
        part.slope, part.told = slope, False
        if part.flow is not None and part.flow.most < math.inf and slope:
            self.network.bound(part.flow, slope)
            self._plan(anew=True)
        else:
            self._review()

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
        elapsed = self.events.now - self.since_s
        if elapsed > 0:
            self.since_s = self.events.now
            for part in self.parts.values():
                if part.slope:
                    part.limit = min(self.total, part.limit + part.slope * elapsed)
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

    @property
    def rides(self) -> bool:
        """Tell whether nothing is left to read but what a source brings."""
        return any(part.flow is not None and part.flow.most < math.inf for part in self.parts.values())

    # --- who gives --------------------------------------------------------------------------------------------------

    def _review(self) -> None:
        """See which sources can give something now."""
        self.count()
        if self.done >= self.total - _EPSILON:
            self.done = self.total
            self._close()
            return self.ended()
        for part in self.parts.values():
            if part.slope and part.lag_s and not part.gone and part.limit <= self.done + self._near:
                part.limit, part.lag_s = self.done - part.slope * part.lag_s, 0.0
        most = self._givers()
        for part in self.parts.values():
            takes = most.get(part)
            if takes is None and part.flow is not None:
                self.network.remove(part.flow)
                part.flow = None
            elif takes is not None and part.flow is None:
                part.flow = Flow(part.links, self, takes)
                self.network.add(part.flow)
            elif takes is not None and part.flow is not None and part.flow.most != takes:
                self.network.bound(part.flow, takes)
        self.network.once_settled(self._tell)
        self._plan(anew=True)

    def _givers(self) -> dict[Part, float]:
        """Return who gives something now, and how fast at most."""
        there = [part for part in self.parts.values() if not part.gone]
        ahead = [part for part in there if part.limit > self.done + self._near]
        if ahead:
            return dict.fromkeys(ahead, math.inf)
        riders = [part for part in there if part.rides and part.limit >= self.done - self._near]
        if not riders:
            return {}
        first = max(riders, key=lambda part: part.slope)
        first.limit = self.done
        return {first: first.slope}

    def changing(self) -> None:
        """Hear that its bytes are about to come at other rates."""
        self.count()

    def changed(self) -> None:
        """Hear that they do."""
        rate = 0.0
        for part in self.parts.values():
            flow = part.flow
            if flow is not None:
                rate += flow.rate
                if flow.rate < flow.most < math.inf:
                    flow.most = math.inf  # it falls behind its source: it may catch up when it can
        if abs(rate - self._told_rate) > 1e-9 * self._told_rate:
            self.network.once_settled(self._tell)
        if self._timer is None or abs(rate - self._planned_rate) > 1e-9 * self._planned_rate:
            self._plan()  # else the sources have only changed places

    def _tell(self) -> None:
        if self.over:
            return
        rate = self.rate
        if abs(rate - self._told_rate) > 1e-9 * max(rate, self._told_rate):
            self._told_rate = rate
            self.moved()

    # --- when to look again -----------------------------------------------------------------------------------------

    def _plan(self, anew: bool = False) -> None:
        """Be called again when there is something to decide, or before: then it is seen how much longer it takes."""
        if self.over:
            return
        rate = self._planned_rate = self.rate
        due_s = self.events.now + self._quiet_s(rate)
        if self._timer is not None:
            if not anew and self._due_s <= due_s < math.inf:
                return
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf:
            self._timer, self._due_s = self.events.at(due_s, self._reach), due_s
        self._starve(rate)

    def _quiet_s(self, rate: float) -> float:
        """Return for how long there is nothing to decide."""
        least = (self.total - self.done) / rate if rate > 0 else math.inf
        for part in self.parts.values():
            if part.gone or (part.limit >= self.total and not part.slope):
                continue
            if part.flow is None:
                if part.rides and part.slope > rate:
                    least = min(least, (self.done - part.limit) / (part.slope - rate))
            elif part.flow.most == math.inf and rate > part.slope:
                spare = 0.0 if part.slope else part.spare_bytes(rate)
                least = min(least, (part.limit - spare - self.done) / (rate - part.slope))
        return max(0.0, least)

    def _starve(self, rate: float) -> None:
        """Say whose limit is used up."""
        for part in self.parts.values():
            if part.told or part.gone or part.slope or part.limit >= self.total:
                continue
            if part.limit <= self.done + part.spare_bytes(rate) + self._near:
                part.told = True
                part.starved()

    def _reach(self) -> None:
        self._timer = None
        self.count()
        for part in self.parts.values():
            if part.flow is not None and not part.slope and abs(self.done - part.limit) <= self._near:
                self.done = part.limit  # rounding of times
        self._review()

    def _close(self) -> None:
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        for part in self.parts.values():
            if part.flow is not None:
                self.network.remove(part.flow)
                part.flow = None
