"""Whatever arrives at its port, the server lives, answers others, executes nothing and stays small."""

from __future__ import annotations

import os
import pickle
import random
import secrets
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tensorhub_core.cli.serve import allow_many_connections
from tensorhub_core.client.oneshot import ask
from tensorhub_core.errors import ProtocolMismatch
from tensorhub_core.server.options import SEND_QUEUE
from tensorhub_core.server.outbox import SESSION_BYTES
from tensorhub_core.state.messages import (
    PROTOCOL,
    Failure,
    GetBlob,
    GetStatus,
    Heartbeat,
    Hello,
    Ok,
    StatusReply,
    UnknownSession,
    Welcome,
)
from tensorhub_core.wire.codec import MAGIC, MAX_MESSAGE_BYTES, decode_request, encode, split
from tests.processes.server.raw import RawClient, ServerProcess, eventually, server_process, tcp

MIB = 1 << 20
HEADER = struct.Struct(">2sHQ")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(autouse=True)
def _still_serves(server: ServerProcess) -> Iterator[None]:
    yield
    assert isinstance(ask(server.address, GetStatus(), timeout_s=20), StatusReply)
    assert "internal error" not in server.log


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def body(kind: str, **fields: object) -> bytes:
    return msgspec.msgpack.encode({"type": kind, **fields})


def header(request: int = 1, protocol: int = PROTOCOL, magic: bytes = MAGIC) -> bytes:
    return HEADER.pack(magic, protocol, request)


SILENT = {
    "one empty frame": [b""],
    "two empty frames": [b"", b""],
    "a header alone": [header()],
    "three frames": [header(), b"\xc0", b""],
    "ten thousand frames": [b"x"] * 10_000,
    "other magic": [header(magic=b"HT"), body("Heartbeat")],
    "a short header": [header()[:-1], body("Heartbeat")],
    "request number 0": [header(0), body("Heartbeat")],
    "random bytes": [random.Random(7).randbytes(1000), random.Random(8).randbytes(1000)],
    "http": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
}
ANSWERED = {
    "no body": b"",
    "not msgpack": b"\xc1\xc1",
    "truncated": body("Hello", protocol=1)[:-1],
    "trailing bytes": body("Heartbeat") + b"\x00",
    "an unknown type": body("DropTables"),
    "a reply": body("Ok"),
    "an unknown field": body("Heartbeat", extra=1),
    "a missing field": body("GetBlob"),
    "a wrong type": body("GetBlob", digest=17),
    "not utf-8": body("Cancel", request=1).replace(b"Cancel", b"\xff\xfe\xfd\xfc\xfb\xfa"),
    "a list": msgspec.msgpack.encode(["Heartbeat"]),
    "a huge declared array": b"\x83\xa4type\xa8Relocate\xa5round\x00\xa8failures\xdd\xff\xff\xff\xff",
    "a huge declared map": b"\xdf\xff\xff\xff\xff",
    "deep nesting": b"\x82\xa4type\xa4Wait\xaanewer_than" + b"\x91" * 100_000,
    "a huge number": b"\x82\xa4type\xa6Cancel\xa7request\xcf" + b"\xff" * 8 + b"\xff",
    "bytes of another serializer": pickle.dumps({"type": "Heartbeat"}),
}


@pytest.mark.parametrize("frames", SILENT.values(), ids=SILENT)
def test_what_is_no_message_is_dropped(server: ServerProcess, frames: list[bytes]) -> None:
    with RawClient(server.address) as client:
        client.socket.send_multipart(frames)
        assert isinstance(client.hello(observer=True), Welcome), "the same connection still works"


@pytest.mark.parametrize("body", ANSWERED.values(), ids=ANSWERED)
def test_a_body_that_is_no_request_gets_a_failure_under_its_number(server: ServerProcess, body: bytes) -> None:
    with RawClient(server.address) as client:
        client.socket.send_multipart([header(77), body])
        number, reply = client.receive()
        assert (number, type(reply)) == (77, Failure)
        assert isinstance(client.hello(observer=True), Welcome)


def test_nothing_that_arrives_is_executed(server: ServerProcess, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    bombs = [pickle.dumps(Bomb(target), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    with RawClient(server.address) as client:
        for bomb in bombs:
            for frames in ([bomb], [header(), bomb], [bomb, bomb], [header(), body("GetBlob", digest=bomb)]):
                client.socket.send_multipart(frames)
    for bomb in bombs:
        with tcp(server.address) as plain:
            plain.sendall(bomb)
    assert isinstance(ask(server.address, GetStatus(), timeout_s=10), StatusReply)
    assert not target.exists()
    (tmp_path / "bomb").write_bytes(bombs[0])
    subprocess.run(
        [sys.executable, "-m", "pickle", str(tmp_path / "bomb")], check=True, timeout=30, capture_output=True
    )
    assert target.exists(), "the bomb works"


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_on_the_plain_port(server: ServerProcess, seed: int) -> None:
    chance = random.Random(seed)
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
    for start in (b"", greeting, greeting + b"\x03\x00NULL" + b"\x00" * 48, b"\x01\x00", b"\x05\x01hello"):
        with tcp(server.address) as plain:
            try:
                for _ in range(20):
                    plain.sendall(start + chance.randbytes(chance.randrange(1, 5000)))
            except OSError:
                continue  # the server closed the connection: as good as dropping the bytes


def test_a_frame_over_the_limit_is_not_stored(server: ServerProcess) -> None:
    before = server.memory_bytes()
    huge = b"\x00" * (100 * MIB)
    with RawClient(server.address) as client:
        client.socket.send_multipart([header(), huge], copy=False)
        peak = 0
        for _ in range(50):
            peak = max(peak, server.memory_bytes())
            time.sleep(0.01)
    assert peak - before < MAX_MESSAGE_BYTES


def test_other_protocol_versions_are_told_ours(server: ServerProcess) -> None:
    with RawClient(server.address) as client:
        client.socket.send_multipart([header(5, PROTOCOL + 1), b"a body that only that version understands"])
        assert client.socket.poll(10_000)
        frames = split(client.socket.recv_multipart())
        assert (frames.protocol, frames.request) == (PROTOCOL, 5)
        reply = client_side_decode(frames.body)
        assert reply["type"] == "Failure"
        assert reply["code"] == ProtocolMismatch.code
        assert str(PROTOCOL + 1) in reply["message"]
        assert isinstance(client.hello(observer=True), Welcome)


def client_side_decode(data: bytes) -> dict[str, str]:
    return msgspec.msgpack.decode(data, type=dict[str, str])


@pytest.mark.parametrize("answer", ["newer header", "refusal"])
def test_a_server_of_another_protocol_is_a_mismatch_that_names_it(answer: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.setsockopt(zmq.LINGER, 0)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        errors: list[BaseException] = []

        def client() -> None:
            try:
                ask(address, GetStatus(), timeout_s=10)
            except ProtocolMismatch as error:
                errors.append(error)

        thread = threading.Thread(target=client)
        thread.start()
        assert other.poll(10_000)
        session, *frames = other.recv_multipart()
        hello = decode_request(split(frames))
        assert isinstance(hello, Hello)
        assert hello.observer
        if answer == "newer header":
            other.send_multipart([session, header(1, PROTOCOL + 1), b"\xc1 not for us"])
        else:
            other.send_multipart([session, *encode(1, Failure(ProtocolMismatch.code, f"{address} speaks another"))])
        thread.join(10)
    assert [type(error) for error in errors] == [ProtocolMismatch]
    assert address in str(errors[0])


def test_a_client_that_does_not_read_costs_a_bound_and_holds_nobody_up(server: ServerProcess) -> None:
    large, small = secrets.token_bytes(4 * MIB), secrets.token_bytes(50_000)
    with RawClient(server.address) as reader:
        reader.hello(observer=True)
        digests = [reader.put(large), reader.put(small)]
    before = server.memory_bytes()
    # Its queues hold one message each, and nobody takes them out.
    with RawClient(server.address, RCVHWM=1, RCVBUF=4096) as greedy, RawClient(server.address) as other:
        greedy.hello(observer=True)
        other.hello(observer=True)
        asked = 4 * SEND_QUEUE
        waits = []
        for count in range(asked):
            greedy.post(GetBlob(digests[count % 2]))
            if count % 64 == 0:
                started = time.monotonic()
                assert isinstance(other.ask(Heartbeat()), Ok)
                waits.append(time.monotonic() - started)
        eventually(lambda: "does not read" in server.log, "the log names it")
        bound = SESSION_BYTES + SEND_QUEUE * len(small)
        assert asked // 2 * len(large) > 10 * bound, "without the bound it would be far more"
        assert server.memory_bytes() - before < bound + 64 * MIB
        assert max(waits) < 5
    eventually(lambda: server.memory_bytes() - before < 64 * MIB, "the memory comes back", 20)


def test_a_flood_of_unread_small_requests_is_bounded(server: ServerProcess) -> None:
    before = server.memory_bytes()
    with RawClient(server.address, RCVHWM=1, SNDHWM=1000) as client:
        frames = encode(9, GetStatus())
        sent = 0
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and sent < 20_000:
            try:
                client.socket.send_multipart(frames, zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                time.sleep(0.001)
        assert sent == 20_000
        assert server.memory_bytes() - before < 64 * MIB


def test_a_thousand_connections_that_say_hello_at_once(server: ServerProcess) -> None:
    connections = 1000
    allow_many_connections()
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, connections + 10)
        clients = [RawClient(server.address, context) for _ in range(connections)]
        try:
            for index, client in enumerate(clients):
                client.post(Hello(PROTOCOL, f"token-{index}", "flood", f"replica-{index}"))
            epochs = set()
            for client in clients:
                _, welcome = client.receive(30)
                assert isinstance(welcome, Welcome)
                epochs.add(welcome.server_epoch)
            assert len(epochs) == 1
            status = ask(server.address, GetStatus("flood"), timeout_s=10)
            assert isinstance(status, StatusReply)
            assert len(status.models[0].replicas) == connections
            assert server.memory_bytes() < 150 * MIB
        finally:
            for client in clients:
                client.close()


def test_who_never_said_hello_is_told_to(server: ServerProcess) -> None:
    with RawClient(server.address) as client:
        client.post(Heartbeat())
        number, reply = client.receive()
        assert number == 0
        assert isinstance(reply, UnknownSession)
