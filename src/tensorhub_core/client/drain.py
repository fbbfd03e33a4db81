"""Take a copy back in the background: one request to the server, awaited by whoever needs its end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tensorhub_core.client.awaiting import Awaited
from tensorhub_core.client.identity import checked
from tensorhub_core.errors import TensorHubError
from tensorhub_core.state.messages import Reply, Request, Unpublish

Submit = Callable[[Request, Callable[[Reply], None]], int]
Withdrawn = Callable[[Callable[[], None]], None]


class Drain:
    """At most one `Unpublish` (or what `request` is) in flight; it outlives the call that gave up waiting for it."""

    def __init__(self, submit: Submit, withdrawn: Withdrawn, request: Request | None = None) -> None:
        """`withdrawn(done)` is called, on the session's thread, before anybody else hears that the copy is withdrawn.

        They hear it when it calls `done()`, from whatever thread.
        """
        self._request: Request = Unpublish() if request is None else request
        self._submit = submit
        self._withdrawn = withdrawn
        self._lock = threading.Lock()
        self._running: Awaited[Reply] | None = None

    def begin(self) -> tuple[Awaited[Reply], bool]:
        """Return the end of the withdrawal, begun now unless one is under way, and whether it was begun now."""
        with self._lock:
            if self._running is not None:
                return self._running, False
            future: Awaited[Reply] = Awaited()
            self._running = future
        try:
            self._submit(self._request, lambda reply: self._ended(future, reply))
        except BaseException:
            with self._lock:
                self._running = None
            raise
        return future, True

    def _ended(self, future: Awaited[Reply], reply: Reply) -> None:
        if error_of(reply) is None:
            self._withdrawn(lambda: self._tell(future, reply))
        else:
            self._tell(future, reply)

    def _tell(self, future: Awaited[Reply], reply: Reply) -> None:
        with self._lock:
            self._running = None
        future.set_result(reply)


def error_of(reply: Reply) -> TensorHubError | None:
    """Return the error that a reply stands for, or None."""
    try:
        checked(reply)
    except TensorHubError as error:
        return error
    return None
