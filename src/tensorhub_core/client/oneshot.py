"""Ask the reference server one question, without a thread: for commands that look and leave."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from tensorhub_core.errors import ConfigError, ProtocolMismatch, ServerUnreachable, TensorHubError, error_from_wire
from tensorhub_core.limits import ZMQ_FILES, check_files
from tensorhub_core.state.messages import PROTOCOL, Failure, Hello, Leave, Reply, Request, Welcome
from tensorhub_core.wire.codec import MAX_MESSAGE_BYTES, MalformedMessage, decode_reply, encode, split

OBSERVER = "observer"
_LEAVE_LINGER_MS = 200


def ask(address: str, message: Request, *, timeout_s: float = 10.0, model: str = OBSERVER) -> Reply:
    """Say hello as an observer of `model`, send one request and return its reply.

    Raises ServerUnreachable naming the address after `timeout_s`, ProtocolMismatch if the server is of another
    release, ConfigError if the address is impossible, and the error that the server answers with. Any thread.
    """
    deadline = time.monotonic() + timeout_s
    with _connected(address) as socket:
        hello = Hello(PROTOCOL, secrets.token_hex(16), model, OBSERVER, observer=True)
        welcome = _exchange(socket, address, 1, hello, deadline, timeout_s)
        if not isinstance(welcome, Welcome):
            raise TensorHubError(f"the server at {address} answered a hello with {type(welcome).__name__}")
        reply = _exchange(socket, address, 2, message, deadline, timeout_s)
        socket.send_multipart(encode(3, Leave()), zmq.NOBLOCK)
        return reply


@contextmanager
def _connected(address: str) -> Iterator[zmq.Socket[bytes]]:
    check_files(ZMQ_FILES, f"a connection to {address}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, _LEAVE_LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            socket.connect(address)
        except (zmq.ZMQError, UnicodeError) as error:
            raise ConfigError(f"{address!r} is not an address: write tcp://HOST:PORT ({error})") from None
        yield socket
    except BaseException:
        socket.setsockopt(zmq.LINGER, 0)
        raise
    finally:
        socket.close()
        context.term()


def _exchange(
    socket: zmq.Socket[bytes], address: str, request: int, message: Request, deadline: float, timeout_s: float
) -> Reply:
    """Send a request and return its reply; pushes and stray replies are skipped."""
    socket.send_multipart(encode(request, message))
    while True:
        left_ms = int((deadline - time.monotonic()) * 1000)
        if left_ms <= 0 or not socket.poll(left_ms):
            raise ServerUnreachable(
                f"no answer from {address} within {timeout_s:g} s: check the address, or start `tensorhub serve`"
            )
        try:
            frames = split(socket.recv_multipart())
            reply = decode_reply(frames)
        except (ProtocolMismatch, MalformedMessage) as error:
            raise type(error)(f"the server at {address} does not fit: {error}") from None
        if frames.request != request:
            continue
        if isinstance(reply, Failure):
            raise error_from_wire(reply.code, reply.message, reply.differences)
        return reply
