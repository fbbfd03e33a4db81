"""Find the one of several servers that serves: which address to try, for how long, and when to look for another.

Pure: time is an argument, and somebody else connects. Only one server serves at a time; the others are standbys, which
do not listen, or are over without knowing it, which their epoch tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorhub_core.errors import ConfigError

MOST_ADDRESSES = 16
TRY_S = 1.0
"""How long an address that says nothing is tried while there are others."""
ANSWER_S = 5.0
"""How long a server that has accepted the connection may take to answer a hello."""
LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0
TRIES_PER_LEASE = 4
"""A server that has restarted listens for one lease: whoever lives tries often enough to be heard by then (law L5)."""
OWN_PAUSE_S = 2.0
"""A longer gap between two looks is this process's own, and not the server's silence."""


def parse_addresses(server: str | Iterable[str]) -> tuple[str, ...]:
    """Return the addresses of one text with commas between them, or of several; raises ConfigError."""
    try:
        texts = [server] if isinstance(server, str) else list(server)
        found = [part.strip() for text in texts for part in text.split(",")]
    except (TypeError, AttributeError):
        raise ConfigError(f"{server!r} is not an address: write tcp://HOST:PORT") from None
    if not found or not all(found):
        raise ConfigError(f"{server!r} is not an address: write tcp://HOST:PORT, several with commas between")
    if len(found) > MOST_ADDRESSES:
        raise ConfigError(f"{len(found)} addresses of servers are too many: at most {MOST_ADDRESSES}")
    return tuple(dict.fromkeys(found))


@dataclass(slots=True)
class Search:
    """Where the session looks for its server.

    `elsewhere`: there is more than this address to try. `epoch` is the highest of any server that was heard.
    """

    addresses: tuple[str, ...]
    since_s: float
    elsewhere: bool = False
    position: int = 0
    epoch: int = 0
    connected: bool = False
    welcome: bool = False
    patience_s: float = ANSWER_S
    most_pause_s: float = MOST_PAUSE_S
    _turned_away: int = 0
    _due_s: float | None = None
    _again: bool = False
    _asked_s: float | None = None
    _looked_s: float | None = None

    def __post_init__(self) -> None:
        self.elsewhere = self.elsewhere or len(self.addresses) > 1

    def up(self, now: float) -> None:
        """Note that there is a connection."""
        self.connected, self.since_s, self._due_s = True, now, None

    def accepts(self, epoch: int) -> bool:
        """Note the epoch of a server; tell whether it may be the one that serves: a lower one than before is not."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return True

    def welcomed(self, lease_s: float) -> None:
        """Note that the server at this address serves; it may be silent for one lease from now on."""
        self.welcome, self._turned_away, self._asked_s, self._due_s = True, 0, None, None
        self.patience_s = max(lease_s, 1.0)
        self.most_pause_s = max(LEAST_PAUSE_S, min(MOST_PAUSE_S, lease_s / TRIES_PER_LEASE))

    def asked(self, now: float) -> None:
        """Note that something was sent which a server answers at once."""
        self._asked_s = now if self._asked_s is None else self._asked_s

    def heard(self) -> None:
        """Note that the server said something."""
        self._asked_s = None

    def lost(self, now: float) -> None:
        """Note that the connection is gone; a server that let us in before is tried first."""
        again, self._again = self.welcome, self.welcome
        self._leave(now, 0.0 if again else self._pause_s())

    def turned_away(self, now: float) -> None:
        """Note that nobody listens at this address, or nobody who serves us."""
        self._again = False
        if self._due_s is None:
            self._leave(now, self._pause_s())

    def _leave(self, now: float, pause_s: float) -> None:
        self.connected = self.welcome = False
        self._asked_s, self._due_s = None, now + pause_s

    def _pause_s(self) -> float:
        """Return a pause that grows with every time that all addresses were tried in vain."""
        pause_s = LEAST_PAUSE_S * 2.0 ** min(10, self._turned_away // len(self.addresses))
        self._turned_away += 1
        return min(self.most_pause_s, pause_s)

    def due(self, now: float) -> bool:
        """Tell whether it is time to connect anew, to `next`'s address."""
        gap_s = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s = now
        if gap_s > OWN_PAUSE_S:
            self.since_s += gap_s
            self._asked_s = None if self._asked_s is None else self._asked_s + gap_s
        if self._due_s is not None:
            return now >= self._due_s
        if not self.elsewhere:
            return False
        if self.welcome:
            return self._asked_s is not None and now - self._asked_s >= self.patience_s
        return now - self.since_s >= (ANSWER_S if self.connected else TRY_S)

    def next(self, now: float) -> str | None:
        """Return the address to connect to from now on; None if it is the one of before, at which a server was."""
        again, self._again = self._again, False
        self.connected = self.welcome = False
        self.since_s, self._asked_s, self._due_s = now, None, None
        if again:
            return None
        self.position = (self.position + 1) % len(self.addresses)
        return self.addresses[self.position]
