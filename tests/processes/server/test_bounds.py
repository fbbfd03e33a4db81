"""What is too large in a message, a frame, a list or a name is refused by name, and nothing of it is kept."""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import xxhash

from tensorhub_core.client.oneshot import ask
from tensorhub_core.state.bounds import MOST_TEXT
from tensorhub_core.state.messages import (
    PROTOCOL,
    Failure,
    GetStatus,
    Hello,
    PutBlob,
    Register,
    StatusReply,
    UnknownSession,
    Welcome,
)
from tensorhub_core.wire.codec import MAGIC
from tests.processes.server.raw import RawClient, ServerProcess, server_process, tcp

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
GREETING = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 16 + b"\x00" + b"\x00" * 31
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def _still_serves(server: ServerProcess) -> Iterator[None]:
    yield
    assert isinstance(ask(server.address, GetStatus(), timeout_s=20), StatusReply)
    assert "internal error" not in server.log


def test_a_frame_that_says_it_has_a_gibibyte_ends_its_connection_at_once(server: ServerProcess) -> None:
    """By hand, because ZeroMQ would have to be given the bytes."""
    before = server.memory_bytes()
    with tcp(server.address) as plain:
        plain.sendall(GREETING)
        received = b""
        while len(received) < len(GREETING):
            received += plain.recv(len(GREETING) - len(received))
        plain.sendall(READY)
        assert plain.recv(1000), "it is a connection like any other"
        plain.sendall(b"\x02" + struct.pack(">Q", 1 << 30))
        deadline = time.monotonic() + 10
        closed = False
        while not closed and time.monotonic() < deadline:
            try:
                plain.sendall(b"\x00" * 65536)
            except OSError:
                closed = True
            time.sleep(0.01)
        assert closed
    assert server.memory_bytes() - before < 16 * MIB


HELLO: dict[str, Any] = {"type": "Hello", "protocol": PROTOCOL, "token": "t", "model": "m", "replica": "r"}
LONG = "x" * 300
FAILURE = {"lease": "l", "kind": "lost"}
TOO_LARGE: dict[str, dict[str, Any]] = {
    "a digest to put": {"type": "PutBlob", "digest": b"x" * 65, "data": b""},
    "a digest to get": {"type": "GetBlob", "digest": b"x" * MIB},
    "a layout's digest": {
        "type": "Register",
        "layout": b"x" * 65,
        "placement": b"",
        "total_bytes": 1,
        "num_segments": 1,
    },
    "a manifest's digest": {"type": "Publish", "number": 1, "sums": b"x" * 65},
    "what is held": {
        **HELLO,
        "held": {
            **{"epoch": 1, "number": 1, "layout": b"x" * 10 * MIB, "placement": b"", "sums": b""},
            **{"total_bytes": 1, "num_segments": 1},
        },
    },
    "a list of failures": {"type": "Relocate", "round": 0, "failures": [FAILURE] * 5000},
    "a lease's id": {"type": "Relocate", "round": 0, "failures": [{"lease": LONG, "kind": "lost"}]},
    "a list of corrupt leases": {"type": "Done", "round": 0, "sums": b"", "corrupt": ["l"] * 5000},
    "an error's code": {"type": "LeaveRound", "round": 0, "code": LONG, "message": ""},
    "an error's text": {"type": "LeaveRound", "round": 0, "code": "error", "message": "x" * (MOST_TEXT + 1)},
}


@pytest.mark.parametrize("message", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_is_refused_by_name(server: ServerProcess, message: dict[str, Any]) -> None:
    with RawClient(server.address) as client:
        client.socket.send_multipart([struct.pack(">2sHQ", MAGIC, PROTOCOL, 9), msgspec.msgpack.encode(message)])
        number, reply = client.receive()
        assert number == 9
        assert isinstance(reply, Failure)
        assert reply.code == "malformed_message"
        assert "length <=" in reply.message
        assert len(reply.message) < 500
        assert isinstance(client.hello(observer=True), Welcome), "the same connection still works"


@pytest.mark.parametrize("what", ["token", "model", "replica", "stream", "zone", "host", "rail"])
@pytest.mark.parametrize("size", [1025, 10 * MIB])
def test_names_are_bounded(server: ServerProcess, what: str, size: int) -> None:
    fields: dict[str, Any] = {"token": secrets.token_hex(8), "model": "m", "replica": "r"}
    fields |= {"replica": secrets.token_hex(8), what: "n" * size}
    with RawClient(server.address) as client:
        reply = client.ask(Hello(PROTOCOL, **fields))
        assert isinstance(reply, Failure)
        assert reply.code == "config_error"
        assert what in reply.message
        assert len(reply.message) < 500
        fields[what] = "n" * 1024
        assert isinstance(client.ask(Hello(PROTOCOL, **fields)), Welcome)


@pytest.mark.parametrize(("shard", "count"), [(0, 0), (1, 1), (-1, 2), (0, 1 << 17), (2**62, 2**63 - 1)])
def test_shards_are_bounded(server: ServerProcess, shard: int, count: int) -> None:
    with RawClient(server.address) as client:
        reply = client.hello(shard=shard, num_shards=count)
        assert isinstance(reply, Failure)
        assert "not possible" in reply.message


def test_what_was_not_put_before_cannot_be_registered(server: ServerProcess) -> None:
    """Where a worker's memory lies comes to others through the server only, from a worker that said hello."""
    blob = xxhash.xxh3_128_digest(b"a placement that nobody put")
    with RawClient(server.address) as client:
        client.hello("stranger")
        reply = client.ask(Register(blob, blob, 1, 1))
        assert isinstance(reply, Failure)
        assert "not uploaded" in reply.message
    with RawClient(server.address) as observer:
        observer.hello(observer=True)
        blob = observer.put(b"a placement of one who holds nothing")
        reply = observer.ask(Register(blob, blob, 1, 1))
        assert isinstance(reply, Failure)
        assert "an observer holds no shard" in reply.message
    with RawClient(server.address) as nobody:
        nobody.post(PutBlob(blob, b"x"))
        assert nobody.receive()[1] == UnknownSession(welcome_epoch(server))


def welcome_epoch(server: ServerProcess) -> int:
    reply = ask(server.address, GetStatus(), timeout_s=20)
    assert isinstance(reply, StatusReply)
    return reply.server_epoch
