"""What goes into the server machine and what comes out of it: structs, because a hub makes some for every message."""

from __future__ import annotations

import msgspec

from tensorhub_core.ids import SessionId
from tensorhub_core.state.messages import Reply, Request


class Received(msgspec.Struct, frozen=True):
    """A request arrived on a session."""

    session: SessionId
    request: int
    message: Request


class Disconnected(msgspec.Struct, frozen=True):
    """The session's connection is known to be gone; the worker is silent from now on, not dead."""

    session: SessionId


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = Received | Disconnected | Tick


class Send(msgspec.Struct, frozen=True):
    """Send a reply (request > 0) or a push (request 0) to a session."""

    session: SessionId
    request: int
    message: Reply


class Log(msgspec.Struct, frozen=True):
    """Log a line at a level of the standard library (`info`, `warning`)."""

    level: str
    text: str


class Drop(msgspec.Struct, frozen=True):
    """Forget a session: nothing is sent to it any more."""

    session: SessionId


class Outdated(msgspec.Struct, frozen=True):
    """Stop: a client has heard of a later life of the server, with this epoch; this one must not decide any more."""

    epoch: int


Effect = Send | Log | Drop | Outdated
