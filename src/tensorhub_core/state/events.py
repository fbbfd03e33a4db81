"""What goes into the server machine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_core.ids import SessionId
from tensorhub_core.state.messages import Reply, Request


@dataclass(frozen=True, slots=True)
class Received:
    """A request arrived on a session."""

    session: SessionId
    request: int
    message: Request


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session's connection is known to be gone; the worker is silent from now on, not dead."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Received | Disconnected | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """Send a reply (request > 0) or a push (request 0) to a session."""

    session: SessionId
    request: int
    message: Reply


@dataclass(frozen=True, slots=True)
class Log:
    """Log a line at a level of the standard library (`info`, `warning`)."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a session: nothing is sent to it any more."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Outdated:
    """Stop: a client has heard of a later life of the server, with this epoch; this one must not decide any more."""

    epoch: int


Effect = Send | Log | Drop | Outdated
