"""A virtual clock: what is to happen at which time, in the order of time and then of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """Something that is to happen once, unless it is cancelled before."""

    __slots__ = ("action", "arguments", "cancelled")

    def __init__(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.action, self.arguments, self.cancelled = action, arguments, False

    def cancel(self) -> None:
        """Let it not happen."""
        self.cancelled = True


class Events:
    """The heap of what is to happen. `after` is called when all that was due at one time has happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self.after: Callable[[], None] = lambda: None
        self._heap: list[tuple[float, int, Timer]] = []
        self._asked = 0

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> Timer:
        """Let `action` happen at a time; what lies in the past happens now."""
        timer = Timer(action, arguments)
        self._asked += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._asked, timer))
        return timer

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> Timer:
        """Let `action` happen after a delay."""
        return self.at(self.now + delay_s, action, *arguments)

    def run(self, done: Callable[[], bool], until_s: float) -> bool:
        """Let things happen until `done()` or a time; returns whether it was done."""
        heap = self._heap
        while not done():
            if not heap or heap[0][0] > until_s:
                return False
            self.now = heap[0][0]
            while heap and heap[0][0] <= self.now:
                timer = heapq.heappop(heap)[2]
                if not timer.cancelled:
                    self.count += 1
                    timer.action(*timer.arguments)
            self.after()
        return True
