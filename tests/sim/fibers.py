"""Virtual time and fibers: code that blocks, run without threads or wall time, in an order that one seed decides.

A fiber is a greenlet of a simulated process. Wherever real code would block, the fiber parks and the timeline goes on
with whatever is due next. Nothing else decides an order: the same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from greenlet import GreenletExit, getcurrent, greenlet

Action = Callable[[], None]
_MOST_AT_ONCE = 20_000
"""Actions at one moment of virtual time after which somebody spins."""
_VACUUM_S = 5.0


class Spinning(BaseException):
    """Virtual time stands still: something asks again and again without ever waiting."""


class Process:
    """A simulated operating system process: it can be stopped for a while, and killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        self.ahead_s = 0.0
        """A dead process's code runs to its end in a vacuum, where all time passes at once."""
        self.fibers: list[Fiber] = []


class Fiber:
    """One thread of a process."""

    def __init__(self, timeline: Timeline, process: Process, name: str, target: Action) -> None:
        self.timeline, self.process, self.name = timeline, process, name
        self.ended = False
        self.error: BaseException | None = None
        self.joiners: list[Fiber] = []
        self._target = target
        self._parked = 0
        self.let = greenlet(self._body, timeline.hub)
        process.fibers.append(self)

    def _body(self) -> None:
        try:
            self._target()
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error
            if self.process.alive:
                self.timeline.failed(self, error)
        self.ended = True
        for joiner in self.joiners:
            joiner.wake()

    def start(self) -> None:
        """Run as soon as the timeline gets to it."""
        self._parked += 1
        token = self._parked
        self.timeline.after(self.timeline.jitter_s(), lambda: self._resume(token, True))

    def park(self, timeout_s: float | None) -> bool:
        """Wait until woken (True) or until the time is over (False); only by the fiber itself."""
        if not self.process.alive:
            if timeout_s is None:
                raise GreenletExit
            self.process.ahead_s += max(timeout_s, _VACUUM_S)
            return False
        assert self.timeline.current is self, "parked from outside"
        self._parked += 1
        token = self._parked
        if timeout_s is not None:
            self.timeline.after(max(timeout_s, 1e-6), lambda: self._resume(token, False))
        woken: bool = self.timeline.hub.switch()
        return woken

    def wake(self) -> None:
        """Let a parked fiber go on; has no effect on one that is not."""
        if self.process.alive and not self.ended:
            token = self._parked
            self.timeline.after(self.timeline.jitter_s(), lambda: self._resume(token, True))

    def _resume(self, token: int, woken: bool) -> None:
        if token != self._parked or self.ended or not self.process.alive:
            return
        if self.process.paused_until > self.timeline.now:
            self.timeline.at(self.process.paused_until, lambda: self._resume(token, woken))
            return
        self._parked += 1
        self.timeline.enter(self, woken)

    def dispose(self) -> None:
        """Run a dead fiber's code to its end, where nothing it does has an effect."""
        if not self.ended and self.let:
            self.timeline.current = self
            self.let.parent = getcurrent()
            self.let.throw(GreenletExit)
            self.timeline.current = None


class Timeline:
    """What happens when; runs in the main greenlet, the hub."""

    def __init__(self, chance: random.Random, begin_s: float = 1000.0) -> None:
        self.chance = chance
        self.now = begin_s
        self.hub = getcurrent()
        self.current: Fiber | None = None
        self.failures: list[tuple[Fiber, BaseException]] = []
        self._due: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when: float, action: Action) -> None:
        """Do something at a time."""
        self._count += 1
        heapq.heappush(self._due, (max(when, self.now), self._count, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do something some time from now."""
        self.at(self.now + delay_s, action)

    def jitter_s(self) -> float:
        """Return how long a system takes to let a thread run."""
        draw = self.chance.random()
        return draw * 2e-4 if draw < 0.98 else self.chance.random() * 2e-2

    def enter(self, fiber: Fiber, woken: bool) -> None:
        """Let a fiber run until it parks."""
        before, self.current = self.current, fiber
        fiber.let.switch(woken) if fiber.let else fiber.let.switch()
        self.current = before

    def failed(self, fiber: Fiber, error: BaseException) -> None:
        """Note what a thread died of."""
        self.failures.append((fiber, error))

    def run(self, until_s: float, over: Callable[[], bool] | None = None) -> None:
        """Let time pass; raises what a thread died of."""
        at_once, moment = 0, self.now
        while self._due and self._due[0][0] <= until_s:
            when, _, action = heapq.heappop(self._due)
            at_once = at_once + 1 if when == moment else 0
            if at_once > _MOST_AT_ONCE:
                raise Spinning(f"at {self.now:.6f} s: {action}")
            self.now = moment = when
            action()
            if self.failures:
                raise self.failures[0][1]
            if over is not None and over():
                return
        self.now = max(self.now, until_s)

    def clear(self) -> None:
        """Forget what would happen next."""
        self._due.clear()


def kill(process: Process) -> None:
    """End a process: none of its threads ever runs again."""
    process.alive = False


def dispose(processes: list[Process]) -> None:
    """Let go of processes whose world has ended."""
    for process in processes:
        process.alive = False
    for process in processes:
        for fiber in process.fibers:
            fiber.dispose()
        process.fibers.clear()
