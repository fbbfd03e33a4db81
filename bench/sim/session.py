"""A worker's session, simulated: what `client/session.py` says and when, without sockets and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from bench.sim.hub import Hub

from tensorhub_core.ids import SessionId
from tensorhub_core.state.messages import (
    PROTOCOL,
    Ended,
    Heartbeat,
    Held,
    Hello,
    PutBlob,
    Register,
    Reply,
    Request,
    UnknownSession,
    Welcome,
)

Answer = Callable[[Reply], None]
_HELLO_FIELDS = frozenset(Hello.__struct_fields__)


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    zone: str
    host: str
    rail: str = ""


@dataclass(frozen=True)
class Identity:
    """Who a worker is."""

    model: str
    replica: str
    shard: int
    num_shards: int
    place: Place
    spot: bool = False
    seeds: bool = False


class Listener(Protocol):
    """Who hears what comes unasked."""

    def on_push(self, message: Reply) -> None:
        """Hear a push."""

    def on_reopened(self, welcome: Welcome) -> None:
        """Hear that the session said hello again, perhaps to another life of the hub."""


@dataclass(eq=False)
class Session:
    """What a worker and the hub say to each other. `send` brings a message to the hub, `latency_s` later."""

    hub: Hub
    identity: Identity
    listener: Listener
    latency_s: float
    id: SessionId
    alive: bool = True
    greeted: bool = False
    held: Held | None = None
    high: tuple[int, int] | None = None
    created: tuple[int, int] | None = None
    ended: Ended | None = None
    blobs: tuple[PutBlob, ...] = ()
    register: Register | None = None
    _pending: dict[int, tuple[Request, Answer, bool]] = field(default_factory=dict)
    _number: int = 0
    _welcomed: Answer | None = None

    def open(self, welcomed: Callable[[], None]) -> None:
        """Say hello for the first time."""
        self._welcomed = lambda _: welcomed()
        self._hello()

    def ask(self, message: Request, answer: Answer, *, durable: bool = False) -> None:
        """Send a request; a durable one is asked again when the hub has restarted."""
        number = self._next()
        self._pending[number] = (message, answer, durable)
        self._send(number, message)

    def tell(self, message: Request) -> None:
        """Send a request whose answer does not matter."""
        self._next()
        self._number += 1
        self._send(self._number, message)

    def beat(self) -> None:
        """Send a heartbeat; it arrives at once, with those of others (see the assumptions)."""
        if self.greeted and self.alive:
            self._next()
            self._number += 1
            self.hub.receive(self.id, self._number, Heartbeat())

    def lost(self) -> None:
        """Notice that the connection is lost."""
        self.greeted = False

    def again(self) -> None:
        """Say hello to whoever listens now."""
        if self.alive:
            self._hello()

    def hear(self, request: int, message: Reply) -> None:
        """Take what the hub says; it arrives `latency_s` after it was said."""
        if not self.alive:
            return
        if isinstance(message, UnknownSession):
            if self.greeted:
                self._hello()
            return
        if isinstance(message, Welcome):
            return self._greet(message)
        key = (getattr(message, "epoch", None), getattr(message, "number", None))
        if key[0] is not None and key[1] is not None:
            self.high = max(self.high or (0, 0), (int(key[0]), int(key[1])))
        if request:
            entry = self._pending.pop(request, None)
            if entry is not None:
                entry[1](message)
        else:
            self.listener.on_push(message)

    def _next(self) -> int:
        self._number += 2 - self._number % 2
        return self._number

    def _send(self, number: int, message: Request) -> None:
        if self.alive:
            self.hub.events.later(self.latency_s, self.hub.receive, self.id, number, message)

    def _hello(self) -> None:
        who, place = self.identity, self.identity.place
        fields = {"zone": place.zone, "host": place.host, "rail": place.rail, "spot": who.spot, "seeds": who.seeds}
        known = {name: value for name, value in fields.items() if name in _HELLO_FIELDS}
        hello = Hello(
            PROTOCOL,
            f"token of {who.replica}/{who.shard}",
            who.model,
            who.replica,
            who.shard,
            who.num_shards,
            high=self.high,
            held=self.held,
            ended=self.ended,
            created=self.created,
            server_epoch=0,
            announces_sums=True,
            **known,  # type: ignore[arg-type]
        )
        self.greeted = False
        self._send(self._next(), hello)

    def _greet(self, welcome: Welcome) -> None:
        again = self._welcomed is None
        open_requests: Iterable[tuple[Request, Answer, bool]] = list(self._pending.values())
        self._pending = {}
        self.greeted = True
        if not again:
            answer, self._welcomed = self._welcomed, None
            self.listener.on_reopened(welcome)
            assert answer is not None
            return answer(welcome)
        for blob in self.blobs:
            self.tell(blob)
        if self.register is not None:
            self.tell(self.register)
        for message, request, durable in open_requests:
            if durable:
                self.ask(message, request, durable=True)
        self.listener.on_reopened(welcome)
