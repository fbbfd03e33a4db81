"""Let the calls that belong to one thread at a time take turns, and the end of it all come last."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tensorhub_core.errors import StateError
from tensorhub_core.limits import start_thread

_BUSY_S = 35.0
"""How long the end waits for the call that runs."""
_END = "close"


class Turns:
    """One call at a time, of whatever thread; a second one is refused, the end waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = ""
        self._owner: int | None = None
        """The thread whose turn it is."""

    @contextlib.contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Hold the turn for a call; raises StateError, which names the call that runs, if it is not free."""
        if not self._lock.acquire(blocking=False):
            raise StateError(f"{what}() was called while {self._running}() runs in another thread")
        self._running, self._owner = what, threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()

    def last(self, end: Callable[[], None]) -> None:
        """Call `end()` when the call that runs is over, after a while also if it is not.

        A signal handler may have interrupted that call: it cannot go on before the handler returns. So nothing is
        waited for then, and `end()` is called on a thread of its own, or by the end that was interrupted.
        """
        if self._owner != threading.get_ident():
            return self._last(end)
        if self._running != _END:
            start_thread(threading.Thread(target=self._last, args=(end,), name="tensorhub-close"))

    def _last(self, end: Callable[[], None]) -> None:
        acquired = self._lock.acquire(timeout=_BUSY_S)
        if acquired:
            self._running, self._owner = _END, threading.get_ident()
        try:
            end()
        finally:
            if acquired:
                self._owner = None
                self._lock.release()
