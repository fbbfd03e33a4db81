"""Whose message is taken next of those that are there; pure.

When a thousand readers ask for a version at once, what each of them says next is little work, and would wait
for the choice of sources of all the others. So what is quick goes first: those that were promised a source begin to
read while others are chosen one. Messages of one session keep their order. What takes long gets its turn all the same.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tensorhub_core.ids import SessionId
from tensorhub_core.state.messages import (
    Announce,
    DescribeVersion,
    GetStatus,
    JoinRound,
    ListVersions,
    Relocate,
    Request,
)

MOST_WAITING = 4096
"""Messages that are read before it is their turn; the rest waits in the socket."""
MOST_WAITING_BYTES = 64 << 20
QUICK_IN_A_ROW = 64
"""So many quick messages are taken before one that takes long, if there is any."""
_LONG = (JoinRound, Relocate, GetStatus, ListVersions, DescribeVersion, Announce)
"""What sources are chosen for, what looks at everything, and news that few wait for: most followers look themselves."""


class Turn(NamedTuple):
    """A message that waits."""

    session: SessionId
    request: int
    message: Request
    size_bytes: int


class Turns:
    """The messages that wait. One thread at a time."""

    def __init__(self) -> None:
        self._quick: deque[Turn] = deque()
        self._long: deque[Turn] = deque()
        self._behind: dict[SessionId, int] = {}
        """Sessions with something among what takes long, and how much: what they say next comes after that."""
        self._bytes = 0
        self._row = 0

    def __len__(self) -> int:
        """Return how many messages wait."""
        return len(self._quick) + len(self._long)

    @property
    def wants(self) -> bool:
        """Tell whether to look for more before the next one is taken: nothing quick waits, and there is room."""
        return not self._quick and len(self._long) < MOST_WAITING and self._bytes < MOST_WAITING_BYTES

    def put(self, turn: Turn) -> None:
        """Let a message wait for its turn."""
        behind = self._behind.get(turn.session, 0)
        if behind or isinstance(turn.message, _LONG):
            self._behind[turn.session] = behind + 1
            self._long.append(turn)
        else:
            self._quick.append(turn)
        self._bytes += turn.size_bytes

    def take(self) -> Turn | None:
        """Return the message whose turn it is, None if none waits."""
        if self._quick and not (self._long and self._row >= QUICK_IN_A_ROW):
            turn = self._quick.popleft()
            self._row += 1
        elif self._long:
            turn = self._long.popleft()
            self._row = 0
            left = self._behind.pop(turn.session) - 1
            if left:
                self._behind[turn.session] = left
        else:
            return None
        self._bytes -= turn.size_bytes
        return turn
