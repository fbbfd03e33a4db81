"""A reference server for tests that says what the test tells it to, on a real ROUTER socket."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from tensorhub_core.state.messages import (
    PROTOCOL,
    Heartbeat,
    Hello,
    Ok,
    Reply,
    Request,
    UnknownSession,
    Welcome,
)
from tensorhub_core.wire.codec import decode_request, encode, split

Script = Callable[["FakeServer", bytes, int, Request], None]


def welcome(epoch: int = 1, next_round: int = 0, heartbeat_s: float = 0.05) -> Welcome:
    return Welcome(f"w{epoch}.1", epoch, 1, next_round, 1, 1.0, heartbeat_s)


def answer_everything(server: FakeServer, session: bytes, request: int, message: Request) -> None:
    """Welcome everybody and say Ok to whatever is asked."""
    server.reply(session, request, welcome(server.epoch) if isinstance(message, Hello) else Ok())


@dataclass
class FakeServer:
    """Runs `script` for every message in a thread; `received` lists them all but the heartbeats."""

    script: Script = answer_everything
    protocol: int = PROTOCOL
    epoch: int = 1
    bind: str = "tcp://127.0.0.1:*"
    mute: bool = False
    """Read on, but say nothing any more, as a process that is stopped."""
    known: set[bytes] = field(default_factory=set)
    received: list[tuple[bytes, int, Request]] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        """Listen until the block ends."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.bind)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,))
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()
            self.socket.close()
            context.term()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if not self.socket.poll(10):
                continue
            session, *frames = self.socket.recv_multipart()
            if self.mute:
                continue
            header = split(frames)
            message = decode_request(header)
            if isinstance(message, Hello):
                self.known.add(session)
            elif session not in self.known:
                self.reply(session, 0, UnknownSession(self.epoch))
                continue
            if isinstance(message, Heartbeat):
                self.reply(session, header.request, Ok())
                continue
            self.received.append((session, header.request, message))
            self.script(self, session, header.request, message)

    def reply(self, session: bytes, request: int, message: Reply) -> None:
        """Send a reply, or a push when `request` is 0; from the server's thread only."""
        self.socket.send_multipart([session, *encode(request, message, self.protocol)])

    def messages(self, kind: type) -> list[Request]:
        """Return what was received of a kind, in order."""
        return [message for _, _, message in self.received if isinstance(message, kind)]
