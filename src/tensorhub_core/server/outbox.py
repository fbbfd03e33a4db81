"""Send replies without ever waiting for a receiver, and without storing more for it than a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

import zmq

from tensorhub_core.ids import SessionId
from tensorhub_core.state.messages import Blob, Reply
from tensorhub_core.wire.codec import MAX_MESSAGE_BYTES, encode

LARGE_BYTES = 64 << 10
"""From this size on, bodies are shared with ZeroMQ instead of copied, and counted until they are sent."""
SESSION_BYTES = 2 * MAX_MESSAGE_BYTES
"""Large bodies waiting for one receiver."""
CACHE_BYTES = 4 * MAX_MESSAGE_BYTES
CACHE_S = 5.0
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: the enumeration's own cost is that of sending a frame."""


class Delivery(Enum):
    """What became of a message."""

    SENT = "sent"
    SLOW = "slow"
    GONE = "gone"


class Outbox:
    """Send through one ROUTER socket, from the loop's thread only.

    Many workers fetch the same blob at the same moment (a layout, right after a publish): its encoded body is kept
    for some seconds and shared by all of them, so that memory grows with the blobs and not with the readers.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._send: Callable[..., zmq.MessageTracker | None] = super(zmq.Socket, socket).send
        """The binding's own, without what wraps it for kinds of sockets that are not used here: three for a message."""
        self._bodies: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self._cached_bytes = 0
        self._waiting: dict[SessionId, list[tuple[zmq.MessageTracker, int]]] = {}

    def send(self, session: SessionId, request: int, message: Reply, now: float) -> Delivery:
        """Send or refuse at once; raises MalformedMessage if the message is over the protocol's limit."""
        if isinstance(message, Blob) and len(message.data) >= LARGE_BYTES:
            header, body = self._encode(request, message, now)
        else:
            header, body = encode(request, message)
        large = len(body) >= LARGE_BYTES
        if large and self._waiting_bytes(session) + len(body) > SESSION_BYTES:
            return Delivery.SLOW
        try:
            self._send(session, _SNDMORE)
            self._send(header, _SNDMORE)
            tracker = self._send(body, _NOBLOCK, not large, large)
        except zmq.Again:
            return Delivery.SLOW
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        if tracker is not None:
            self._waiting.setdefault(session, []).append((tracker, len(body)))
        return Delivery.SENT

    def forget(self, session: SessionId) -> None:
        """Stop counting for a session."""
        self._waiting.pop(session, None)

    def sweep(self, now: float) -> None:
        """Let go of bodies that nobody fetched lately and of sends that are over."""
        while self._bodies and now - next(iter(self._bodies.values()))[1] > CACHE_S:
            self._evict()
        for session in list(self._waiting):
            self._waiting_bytes(session)

    def _encode(self, request: int, message: Blob, now: float) -> tuple[bytes, bytes]:
        cached = self._bodies.pop(message.digest, None)
        header, body = encode(request, message) if cached is None else (encode(request, _EMPTY)[0], cached[0])
        self._cached_bytes += len(body) if cached is None else 0
        self._bodies[message.digest] = (body, now)
        while self._cached_bytes > CACHE_BYTES:
            self._evict()
        return header, body

    def _evict(self) -> None:
        _, (body, _) = self._bodies.popitem(last=False)
        self._cached_bytes -= len(body)

    def _waiting_bytes(self, session: SessionId) -> int:
        waiting = [entry for entry in self._waiting.get(session, ()) if not entry[0].done]
        if waiting:
            self._waiting[session] = waiting
        else:
            self._waiting.pop(session, None)
        return sum(size for _, size in waiting)


_EMPTY = Blob(b"", b"")
