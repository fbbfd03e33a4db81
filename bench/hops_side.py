"""A node (`nodes.py`) that also notes when each segment of a read was posted, landed, was verified and was shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nodes import Node
from remote import Say, answer

from tensorhub_core.client.looking import Looks
from tensorhub_core.client.prefix_word import PrefixPage
from tensorhub_core.client.pump import Pump
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.client.verifier import Checker, Verifier

Note = tuple[str, float, int, int]
"""What happened, when, and to which reads `begin..end` of the plan, or up to which segment."""


class Notes:
    """Notes of one process, taken where the product's own functions are called."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        note = self.notes.append
        self._around(Pump, "_post", lambda pump, lane, part: note(("posted", time.monotonic(), part.begin, part.end)))
        self._around(
            Verifier,
            "submit",
            lambda verifier, checker, landed, deliver: note(("landed", time.monotonic(), landed.begin, landed.end)),
        )
        self._around(
            Checker,
            "check",
            lambda checker, landed: note(("checked", time.monotonic(), landed.begin, landed.end)),
            after=True,
        )
        self._around(PrefixPage, "show", lambda page, tag, segments: note(("shown", time.monotonic(), 0, segments)))
        self._around(Looks, "_ask", lambda looks, *rest: note(("looked", time.monotonic(), 0, 0)))
        self._around(ReadJob, "advance", lambda job, lease, prefix: note(("allowed", time.monotonic(), 0, prefix)))

    @staticmethod
    def _around(owner: type, name: str, hear: Callable[..., None], after: bool = False) -> None:
        """Have `hear` called before or after a method."""
        method = getattr(owner, name)

        def heard(*arguments: Any, **named: Any) -> Any:
            if not after:
                hear(*arguments, **named)
                return method(*arguments, **named)
            result = method(*arguments, **named)
            hear(*arguments, **named)
            return result

        setattr(owner, name, heard)


class NotingNode(Node):
    """A node that hands over its notes."""

    def __init__(self, say: Say) -> None:
        super().__init__(lambda event: None)
        self._notes = Notes()

    def do_notes(self) -> list[Note]:
        """Return what was noted since the last call."""
        taken = self._notes.notes[:]
        del self._notes.notes[: len(taken)]
        return taken


def main() -> None:
    """Serve commands until the input ends."""
    made: list[Node] = []

    def begin(say: Say) -> dict[str, Callable[..., Any]]:
        made.append(NotingNode(say))
        return made[0].commands()

    answer(begin)
    made[0].close()


if __name__ == "__main__":
    main()
