"""Hear the session for a worker, without keeping the worker alive."""

from __future__ import annotations

import threading

from tensorhub_core.client.awaiting import Bell
from tensorhub_core.client.driver import RoundDriver
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.rounds import Broken
from tensorhub_core.errors import TensorHubError
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.state.messages import DropOffload, Offload, Reply, SumsWanted, Welcome


class Mailbox:
    """The session's listener: passes what concerns a round on to it, and remembers the newest welcome."""

    def __init__(self, counters: WorkerCounters) -> None:
        self.counters = counters
        self._lock = threading.RLock()  # entered in one step: no interruption leaves it held
        self._changed = Bell()
        self._driver: RoundDriver | None = None
        self._welcome: tuple[Welcome, int] | None = None
        self.over: TensorHubError | None = None
        self.resources: Resources | None = None

    def on_push(self, message: Reply) -> None:
        """Pass a push on to the round in flight, to what keeps offload copies, or to what sums parts for readers."""
        resources = self.resources
        if isinstance(message, Offload | DropOffload):
            return None if resources is None else resources.offloads.on_push(message)
        if isinstance(message, SumsWanted):
            return None if resources is None else resources.voucher.on_push(message)
        driver = self._driver
        if driver is not None:
            driver.on_push(message)

    def on_reopened(self, welcome: Welcome, life: int) -> None:
        """Remember the welcome and pass it on to the round in flight."""
        with self._lock:
            self.counters.reconnects += 1
            self._welcome = (welcome, life)
            if self._driver is not None:
                self._driver.on_reopened(welcome, life)
        self._changed.ring()

    def on_over(self, error: TensorHubError) -> None:
        """Remember why the session ended and end the round in flight."""
        with self._lock:
            self.over = error
            if self._driver is not None:
                self._driver.post(Broken(error))
        self._changed.ring()

    def welcomed(self, welcome: Welcome) -> None:
        """Note the first welcome."""
        with self._lock:
            self._welcome = self._welcome or (welcome, 1)

    def newest(self) -> tuple[Welcome, int]:
        """Return the newest welcome and the session's life that began with it."""
        with self._lock:
            assert self._welcome is not None
            return self._welcome

    def wait_for_welcome(self, life: int, timeout_s: float) -> None:
        """Wait until a welcome after that of `life` has come, or the session is over, or the time."""
        self._changed.wait_for(lambda: self.over is not None or self.newest()[1] != life, timeout_s)

    def attach(self, driver: RoundDriver) -> None:
        """Pass everything on to a round from now on, also what it has just missed."""
        with self._lock:
            self._driver = driver
            if self._welcome is not None and self._welcome[1] != driver.life:
                driver.on_reopened(*self._welcome)
            if self.over is not None:
                driver.post(Broken(self.over))

    def detach(self) -> None:
        """Pass nothing on any more."""
        with self._lock:
            self._driver = None

    def interrupt(self, error: TensorHubError) -> None:
        """End the round in flight, if there is one."""
        with self._lock:
            if self._driver is not None:
                self._driver.post(Broken(error))
