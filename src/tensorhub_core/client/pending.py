"""The requests of a session that have no answer yet, and what of them still has to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_core.state.messages import Failure, Reply


@dataclass(slots=True)
class OpenRequest:
    """A request without an answer yet."""

    frames: list[bytes]
    answer: Callable[[Reply], None]
    life: int | None
    """The welcome after which it was asked, if it means nothing after another one; None = durable."""
    sent: bool = False

    def stale(self, life: int) -> bool:
        """Tell whether it belongs to another life of the session than this one."""
        return self.life is not None and self.life != life


class Pending:
    """Open requests by number; belongs to the session's thread."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}
        self._unsent: deque[int] = deque()

    @property
    def unsent(self) -> bool:
        """Tell whether there is something to send."""
        return bool(self._unsent)

    def add(self, number: int, entry: OpenRequest) -> None:
        """Take a request, to be sent after those before it."""
        self._open[number] = entry
        self._unsent.append(number)

    def forget(self, number: int) -> None:
        """Not wait for a reply any more."""
        self._open.pop(number, None)

    def answer(self, number: int, reply: Reply) -> None:
        """Hand a reply to whoever asked, if somebody did."""
        entry = self._open.pop(number, None)
        if entry is not None:
            entry.answer(reply)

    def begin(self, life: int, first: dict[int, OpenRequest]) -> None:
        """Begin a life of the session: forget what belongs to earlier ones, send the rest again, `first` before it."""
        for number in [n for n, entry in self._open.items() if entry.stale(life)]:
            del self._open[number]
        for entry in self._open.values():
            entry.sent = False
        self._unsent = deque([*first, *self._open])
        self._open.update(first)

    def send(self, send: Callable[[list[bytes]], bool]) -> None:
        """Send what waits, until `send` has no room."""
        while self._unsent:
            entry = self._open.get(self._unsent[0])
            if entry is not None and not entry.sent:
                if not send(entry.frames):
                    return
                entry.sent = True
            self._unsent.popleft()

    def fail(self, failure: Failure) -> None:
        """Answer everything with a failure."""
        for entry in list(self._open.values()):
            entry.answer(failure)
        self._open.clear()
