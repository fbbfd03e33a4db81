"""Speak the protocol by hand, rightly or wrongly, and watch a server process."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import psutil
import xxhash
import zmq

from tensorhub_core.state.messages import PROTOCOL, Failure, Hello, Publish, PutBlob, Register, Reply, Request
from tensorhub_core.wire.codec import decode_reply, encode, split

ANSWER_S = 10.0


class RawClient:
    """A DEALER that sends what it is told to."""

    def __init__(self, address: str, context: zmq.Context | None = None, **options: int) -> None:
        self._own = zmq.Context() if context is None else None
        self.socket = (context or self._own).socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)
        self.last_request = 0

    def post(self, message: Request) -> int:
        """Send a request and return its number."""
        self.last_request += 1
        self.socket.send_multipart(encode(self.last_request, message))
        return self.last_request

    def receive(self, timeout_s: float = ANSWER_S) -> tuple[int, Reply]:
        """Return the next message's request number and the message."""
        assert self.socket.poll(int(timeout_s * 1000)), "no message from the server"
        frames = split(self.socket.recv_multipart())
        return frames.request, decode_reply(frames)

    def ask(self, message: Request) -> Reply:
        """Send a request and return its reply; pushes are skipped."""
        number = self.post(message)
        while True:
            answered, reply = self.receive()
            if answered == number:
                return reply

    def hello(self, replica: str = "r", model: str = "policy", **about: object) -> Reply:
        """Say hello as a shard or observer."""
        return self.ask(Hello(PROTOCOL, secrets.token_hex(8), model, replica, **about))

    def publish(self, number: int, total_bytes: int = 1000, salt: bytes = b"") -> Reply:
        """Register memory that exists on paper only, and publish a version of it."""
        layout, placement, sums = (self.put(part + salt) for part in (b"layout", b"placement", b"sums"))
        assert not isinstance(self.ask(Register(layout, placement, total_bytes, 1)), Failure)
        return self.ask(Publish(number, sums))

    def put(self, data: bytes) -> bytes:
        """Store a blob and return its digest."""
        digest = xxhash.xxh3_128_digest(data)
        reply = self.ask(PutBlob(digest, data))
        assert not isinstance(reply, Failure), reply
        return digest

    def close(self) -> None:
        """Disconnect."""
        self.socket.close(linger=0)
        if self._own is not None:
            self._own.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ServerProcess:
    """`tensorhub serve` as a process of its own."""

    def __init__(self, *arguments: str, errors: Path) -> None:
        self.errors = errors
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tensorhub_core.cli.main", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline().rstrip("\n")
        self.address = self.first_line.removeprefix("listening on ")

    @property
    def log(self) -> str:
        """Return what the server wrote to stderr so far."""
        return self.errors.read_text()

    def memory_bytes(self) -> int:
        """Return the resident memory."""
        return psutil.Process(self.process.pid).memory_info().rss

    def end(self) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextlib.contextmanager
def server_process(folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """Run `tensorhub serve` on a free port for the block; it has to end with exit code 0."""
    server = ServerProcess("--bind", "tcp://127.0.0.1:0", *arguments, errors=folder / "serve.err")
    try:
        yield server
    except BaseException:
        server.end()
        raise
    assert server.end() == 0, server.log


def tcp(address: str) -> socket.socket:
    """Connect a plain TCP socket to a server."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=ANSWER_S)


def free_port() -> int:
    """Return a TCP port that nobody listens on right now."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
