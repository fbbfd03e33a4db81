"""Wait for an answer in a way that an interruption of the waiting thread (Ctrl-C) cannot break.

`concurrent.futures.Future` is guarded by a condition, which an exception from a signal handler may leave locked for
ever: the session's thread would then stop at the answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

T = TypeVar("T")
_LOOK_EVERY_S = 1.0


class Bell:
    """Wakes one thread that waits for something.

    Where an interruption ends a wait, a condition may keep its lock, or let go of it twice and hide what happened. And
    `SimpleQueue.get(timeout=...)` of CPython 3.11 may wait for ever if its time passes before it begins to wait.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Have the waiting thread look again, or the next one that waits; call it after what it waits for is so."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._silent.release()

    def wait_for(self, ready: Callable[[], object], timeout_s: float) -> bool:
        """Wait until something is so and return True, or False after `timeout_s`. Under no lock."""
        end = time.monotonic() + timeout_s
        while not ready():
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            self._silent.acquire(timeout=min(left_s, _LOOK_EVERY_S))
        return True


class Awaited(Generic[T]):
    """An answer that one thread gives, once, and others wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given = Bell()
        self._callbacks: list[Callable[[Awaited[T]], None]] = []
        self._value: list[T] = []
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Tell whether it has been given."""
        return bool(self._value) or self._error is not None

    def set_result(self, value: T) -> None:
        """Give it, and tell all who want to hear of it, on this thread."""
        with self._lock:
            self._value.append(value)
        self._tell()

    def set_exception(self, error: BaseException) -> None:
        """Give an error instead."""
        with self._lock:
            self._error = error
        self._tell()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for it and return it; raises FutureTimeout after `timeout_s` (None: never), or the error given."""
        while not self._given.wait_for(self.done, _LOOK_EVERY_S if timeout_s is None else timeout_s):
            if timeout_s is not None:
                raise FutureTimeout
        self._given.ring()  # for others who wait
        if self._error is not None:
            raise self._error
        return self._value[0]

    def add_done_callback(self, callback: Callable[[Awaited[T]], None]) -> None:
        """Have `callback` called with it when it is given, or now."""
        with self._lock:
            done = self.done()
            if not done:
                self._callbacks.append(callback)
        if done:
            callback(self)

    def _tell(self) -> None:
        self._given.ring()
        for callback in self._callbacks:
            callback(self)
