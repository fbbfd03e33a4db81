"""Drive the real server machine by hand: send requests as named workers, read what they were told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import xxhash

from tensorhub_core.ids import SessionId
from tensorhub_core.schedule.policy import AUTO
from tensorhub_core.state.events import Event, Log, Received, Send, Tick
from tensorhub_core.state.machine import MachineConfig, ServerState, step
from tensorhub_core.state.messages import (
    PROTOCOL,
    Failure,
    Hello,
    JoinRound,
    Ok,
    Publish,
    PutBlob,
    Register,
    Reply,
    Request,
    Unpublish,
    Wait,
    Welcome,
)

M = TypeVar("M", bound=Reply)
LARGE_COPIES = replace(AUTO, lag_bytes=1)
"""A few bytes stand for many: what lies between two readers of a chain is nothing to a whole copy."""


def digest(data: bytes) -> bytes:
    """Return the digest under which a blob is stored."""
    return xxhash.xxh3_128_digest(data)


@dataclass
class Peer:
    """One worker as seen from outside: what was answered, by request number, and what was pushed."""

    hub: Hub
    name: str
    session: SessionId
    shard: int = 0
    next_request: int = 1
    answers: dict[int, Reply] = field(default_factory=dict)
    pushes: list[Reply] = field(default_factory=list)

    def ask(self, message: Request) -> int:
        """Send a request and return its number."""
        number = self.next_request
        self.next_request += 1
        self.hub.feed(Received(self.session, number, message))
        return number

    def call(self, message: Request, kind: type[M]) -> M:
        """Send a request that has to be answered at once by `kind`."""
        return self.answer(self.ask(message), kind)

    def answer(self, number: int, kind: type[M]) -> M:
        """Return the answer to a request, which has to be there and of `kind`."""
        reply = self.answers[number]
        assert isinstance(reply, kind), reply
        return reply

    def refused(self, message: Request, code: str) -> Failure:
        """Send a request that has to be refused with `code`."""
        failure = self.call(message, Failure)
        assert failure.code == code, failure
        return failure

    def put(self, data: bytes) -> bytes:
        """Upload a blob and return its digest."""
        self.call(PutBlob(digest(data), data), Ok)
        return digest(data)

    def register(self, layout: bytes, segments: int = 4, portable: bool = True) -> None:
        """Register memory of a layout (named by any bytes), 100 bytes a segment."""
        placement = self.put(b"placement of " + self.session)
        self.call(Register(self.put(layout), placement, 100 * segments, segments, portable), Ok)

    def publish(self, number: int, content: bytes, kind: type[M], held_epoch: int | None = None) -> M:
        """Publish a version whose checksums are `content`."""
        return self.call(Publish(number, self.put(content), held_epoch), kind)

    def unpublish(self) -> int:
        """Ask for the copy back."""
        return self.ask(Unpublish())

    def join(self, number: int, want: int | None = None, **more: object) -> int:
        """Join a round."""
        return self.ask(JoinRound(number, want, **more))  # type: ignore[arg-type]

    def wait(self, newer_than: tuple[int, int] | None = None) -> int:
        """Wait for a newer version."""
        return self.ask(Wait(newer_than))

    def pushed(self, kind: type[M]) -> list[M]:
        """Return all pushes of a kind so far."""
        return [p for p in self.pushes if isinstance(p, kind)]


class Hub:
    """The machine with a clock that only moves when told."""

    def __init__(self, server_epoch: int = 1, **config: object) -> None:
        self.now = 1000.0
        more = {"policy": LARGE_COPIES, **config}
        self.config = MachineConfig(server_epoch=server_epoch, **more)  # type: ignore[arg-type]
        self.state = ServerState.new(self.config, self.now)
        self.peers: dict[SessionId, Peer] = {}
        self.logs: list[str] = []
        self.lives = 0

    def feed(self, event: Event) -> None:
        """Take a step and deliver its effects."""
        self.state, effects = step(self.state, event, self.now)
        for effect in effects:
            if isinstance(effect, Send):
                peer = self.peers.get(effect.session)
                if peer is None:
                    continue
                if effect.request == 0:
                    peer.pushes.append(effect.message)
                else:
                    assert effect.request not in peer.answers, "a request was answered twice"
                    peer.answers[effect.request] = effect.message
            elif isinstance(effect, Log):
                self.logs.append(effect.text)

    def peer(self, name: str) -> Peer:
        """Return a connection that has said nothing yet."""
        self.lives += 1
        session = SessionId(f"{name}#{self.lives}".encode())
        self.peers[session] = Peer(self, name, session)
        return self.peers[session]

    def hello(self, replica: str, shard: int = 0, num_shards: int = 1, **more: object) -> Peer:
        """Connect a worker and say hello."""
        peer = self.peer(f"{replica}/{shard}")
        peer.shard = shard
        token = str(more.pop("token", peer.session.decode()))
        model = str(more.pop("model", "policy"))
        hello = Hello(PROTOCOL, token, model, replica, shard, num_shards, **more)  # type: ignore[arg-type]
        peer.call(hello, Welcome)
        return peer

    def later(self, seconds: float, silent: tuple[Peer, ...] = ()) -> None:
        """Let time pass; everybody but the silent ones keeps its heartbeat."""
        from tensorhub_core.state.messages import Heartbeat

        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            for peer in list(self.peers.values()):
                if peer not in silent and peer.session in self.state.sessions:
                    peer.ask(Heartbeat())
            self.feed(Tick())
