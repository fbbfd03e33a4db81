"""Who speaks to a tcp source, or answers for one, without being what it should be: nothing happens but an ended
connection."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from tensorhub_core.clock import SystemClock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import PeerId, Region
from tensorhub_core.transport.description import encode_description
from tensorhub_core.transport.extents import Extents, pack_regions
from tensorhub_core.transport.tcp import TcpTransport
from tensorhub_core.transport.tcp_serving import ServingLimits, TcpServer
from tensorhub_core.transport.tcp_wire import (
    HEADER_BYTES,
    Endpoint,
    Kind,
    TcpOffer,
    decode_header,
    encode_frame,
    encode_metadata,
    prove,
)
from tests.transport.lab import SENTINEL, batch

pytestmark = pytest.mark.timeout(60)

SIZE = 1 << 20
QUICK = ServingLimits(strangers=4, stranger_s=0.3, grace_s=0.1, frame_s=0.3, stalled_s=0.5)


class Source:
    """A server of `memory` u8 [SIZE] that soon loses its patience."""

    def __init__(self) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        self.regions = [Region(self.memory.ctypes.data, SIZE)]
        self.server = TcpServer("source", None, SystemClock(), QUICK)
        self.server.allowed = Extents(self.regions)
        self.endpoint = next(endpoint for endpoint in self.server.endpoints if endpoint.address == "127.0.0.1")

    def description(self, secret: bytes | None = None, endpoint: Endpoint | None = None) -> bytes:
        """Describe it, or what passes for it."""
        at = self.endpoint if endpoint is None else endpoint
        secret = self.server.secret if secret is None else secret
        offer = TcpOffer(secret, TcpTransport("x")._host, (at,), pack_regions(self.regions))
        return encode_description("tcp", self.server.agent, encode_metadata(offer))

    def dial(self) -> socket.socket:
        """Return a fresh connection of a stranger."""
        return socket.create_connection((self.endpoint.address, self.endpoint.port), timeout=10)


@pytest.fixture
def source() -> Iterator[Source]:
    opened = Source()
    yield opened
    opened.server.stop()


class Reader:
    """A right reader of the source."""

    def __init__(self) -> None:
        self.memory = np.full(SIZE, SENTINEL, np.uint8)
        self.transport = TcpTransport("reader", connect_timeout_s=5.0)
        self.transport.register_local([Region(self.memory.ctypes.data, SIZE)])

    def read(self, peer: PeerId, source: Source, size: int = SIZE) -> str:
        """Read; returns the error of a read that failed."""
        run = batch((self.memory.ctypes.data, source.memory.ctypes.data, size))
        read = self.transport.post(peer, run)
        end = time.monotonic() + 10
        while (progress := self.transport.poll(read)).state.value == "active" and time.monotonic() < end:
            time.sleep(0.0005)
        assert progress.state.value != "active"
        self.transport.close(read)
        return progress.error


@pytest.fixture
def reader() -> Iterator[Reader]:
    opened = Reader()
    yield opened
    opened.transport.shutdown()


def whole(dialled: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes."""
    data = b""
    while len(data) < size:
        part = dialled.recv(size - len(data))
        assert part, f"the connection ended after {data!r}"
        data += part
    return data


def ended(dialled: socket.socket) -> bool:
    """Wait for the other side to end the connection; True if nothing came before."""
    with contextlib.suppress(ConnectionError):
        return dialled.recv(1) == b""
    return True


def enter(source: Source, secret: bytes | None = None) -> socket.socket:
    """Prove what a reader has to prove, by hand."""
    dialled, nonce = source.dial(), b"n" * 16
    dialled.sendall(encode_frame(Kind.HELLO, 0, nonce))
    assert decode_header(whole(dialled, HEADER_BYTES)).kind is Kind.CHALLENGE
    theirs, proof = whole(dialled, 16), whole(dialled, 32)
    assert proof == prove(source.server.secret, "source", "source", nonce, theirs)
    secret = source.server.secret if secret is None else secret
    dialled.sendall(encode_frame(Kind.PROOF, 0, prove(secret, "reader", "source", nonce, theirs)))
    return dialled


def welcomed(source: Source) -> socket.socket:
    dialled = enter(source)
    assert whole(dialled, HEADER_BYTES) == encode_frame(Kind.WELCOME)
    return dialled


def runs(*pairs: tuple[int, int]) -> bytes:
    """Return the payload of a READ."""
    return struct.pack(f"<{2 * len(pairs)}Q", *(address for address, _ in pairs), *(length for _, length in pairs))


STRANGE = {
    "noise": np.random.default_rng(0).integers(0, 256, 4096, np.uint8).tobytes(),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(100_000),
    "one byte": b"T",
    "half a head": encode_frame(Kind.HELLO, 0, b"n" * 16)[:9],
    "half a hello": encode_frame(Kind.HELLO, 0, b"n" * 16)[:-1],
    "a long hello": encode_frame(Kind.HELLO, 0, b"n" * 17),
    "a giant hello": struct.pack("<4sHHQ", b"THB1", Kind.HELLO, 0, 1 << 30) + b"n" * 4096,
    "a read at once": encode_frame(Kind.READ, 1, runs((0, 16))),
    "a proof at once": encode_frame(Kind.PROOF, 0, b"p" * 32),
    "nothing": b"",
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
def test_a_stranger_gets_nothing(source: Source, reader: Reader, data: bytes) -> None:
    peer = reader.transport.attach(source.description())
    with source.dial() as dialled:
        with contextlib.suppress(ConnectionError):
            dialled.sendall(data)
        assert ended(dialled)
    assert reader.read(peer, source) == ""
    assert np.array_equal(reader.memory, source.memory)


def test_slow_strangers_make_room_for_others(source: Source, reader: Reader) -> None:
    slow = [source.dial() for _ in range(3 * QUICK.strangers)]
    peer = reader.transport.attach(source.description())
    assert reader.read(peer, source) == ""
    for dialled in slow:
        assert ended(dialled)
        dialled.close()


def test_readers_that_come_all_at_once_wait_for_each_other(source: Source) -> None:
    few = TcpServer("source", None, SystemClock(), ServingLimits(strangers=2, grace_s=60.0))
    few.allowed = Extents(source.regions)
    source.server.stop()
    source.server = few
    at = next(endpoint for endpoint in few.endpoints if endpoint.address == "127.0.0.1")
    readers, errors = [Reader() for _ in range(24)], []

    def attach(reader: Reader) -> None:
        try:
            errors.append(reader.read(reader.transport.attach(source.description(endpoint=at)), source, 4096))
        except TransportError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=attach, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == [""] * len(readers)
    for reader in readers:
        assert np.array_equal(reader.memory[:4096], source.memory[:4096])
        reader.transport.shutdown()


def test_a_stranger_that_drips_is_ended_in_time(source: Source) -> None:
    with source.dial() as dialled:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in encode_frame(Kind.HELLO, 0, b"n" * 16)[:-1]:
                dialled.sendall(bytes([byte]))
                time.sleep(0.05)
        assert ended(dialled)
        assert time.monotonic() - begun < 10


def test_without_the_secret_there_is_no_byte(source: Source, reader: Reader) -> None:
    with enter(source, b"w" * 16) as dialled:
        dialled.sendall(encode_frame(Kind.READ, 1, runs((source.memory.ctypes.data, 16))))
        assert ended(dialled)
    with pytest.raises(TransportError, match="not the peer of this description"):
        reader.transport.attach(source.description(secret=b"w" * 16))


@pytest.mark.parametrize("size", [0, 8, 24, (1 << 20) + 16, 1 << 30, 2**64 - 1])
def test_a_reader_that_asks_for_no_whole_runs_is_ended(source: Source, size: int) -> None:
    before = psutil.Process().memory_info().rss
    with welcomed(source) as dialled:
        with contextlib.suppress(ConnectionError):
            dialled.sendall(struct.pack("<4sHHQ", b"THB1", Kind.READ, 1, size) + bytes(min(size, 1 << 20)))
        assert ended(dialled)
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_half_a_request_is_ended_in_time(source: Source) -> None:
    with welcomed(source) as dialled:
        time.sleep(2 * QUICK.frame_s)  # an idle reader may stay as long as it likes
        dialled.sendall(encode_frame(Kind.READ, 1, runs((source.memory.ctypes.data, 16)))[:-1])
        assert ended(dialled)


def test_memory_that_is_not_served_is_refused_and_the_connection_stays(source: Source) -> None:
    at = source.memory.ctypes.data
    secret = np.frombuffer(b"this is not served", np.uint8)
    with welcomed(source) as dialled:
        for number, wrong in enumerate([(at - 1, 2), (at + SIZE, 1), (at, SIZE + 1), (at, 2**64 - at + 1), (0, 1)]):
            for pairs in ((wrong,), ((at, 16), wrong)):
                dialled.sendall(encode_frame(Kind.READ, number, runs(*pairs)))
                header = decode_header(whole(dialled, HEADER_BYTES))
                assert (header.kind, header.number) == (Kind.REFUSED, number)
                assert b"outside" in whole(dialled, header.size_bytes)
        dialled.sendall(encode_frame(Kind.READ, 9, runs((secret.ctypes.data, 18))))
        header = decode_header(whole(dialled, HEADER_BYTES))
        assert header.kind is Kind.REFUSED
        whole(dialled, header.size_bytes)
        dialled.sendall(encode_frame(Kind.READ, 10, runs((at + 5, 7), (at, 0), (at + 1, 2))))
        assert whole(dialled, HEADER_BYTES) == struct.pack("<4sHHQ", b"THB1", Kind.BYTES, 10, 9)
        assert whole(dialled, 9) == source.memory[5:12].tobytes() + source.memory[1:3].tobytes()


def test_requests_that_come_together_are_answered_in_order(source: Source) -> None:
    at = source.memory.ctypes.data
    scattered = [(at + 2000 * number, 1 + number % 7) for number in range(500)]
    data = b"".join(source.memory[start - at : start - at + size].tobytes() for start, size in scattered)
    asked, expected = b"", b""
    for number in range(8):
        wrong = number in (2, 5)
        asked += encode_frame(Kind.READ, number, runs((at, SIZE + 1)) if wrong else runs(*scattered))
        text = b"a run lies outside the memory that it serves"
        expected += encode_frame(Kind.REFUSED if wrong else Kind.BYTES, number, text if wrong else data)
    with welcomed(source) as dialled:
        dialled.sendall(asked)
        assert whole(dialled, len(expected)) == expected
        dialled.sendall(encode_frame(Kind.READ, 8, runs((at, 1))) + b"noise")
        with contextlib.suppress(ConnectionError):
            while dialled.recv(100):
                continue


Answer = Callable[[socket.socket, bytes], None]


class Impostor:
    """Somebody who answers at a source's port; `answer` gets the connection and its HELLO."""

    def __init__(self, answer: Answer) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._listener.accept()[0] as taken:
            taken.settimeout(10)
            self._answer(taken, whole(taken, HEADER_BYTES + 16))

    def end(self) -> None:
        """Wait for it."""
        self._thread.join(10)
        self._listener.close()


def _echo(taken: socket.socket, hello: bytes) -> None:
    taken.sendall(hello)


def _guess(taken: socket.socket, hello: bytes) -> None:
    taken.sendall(encode_frame(Kind.CHALLENGE, 0, bytes(48)) + encode_frame(Kind.WELCOME))
    while taken.recv(100):  # until the reader goes away
        continue


def _noise(taken: socket.socket, hello: bytes) -> None:
    taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def _hang_up(taken: socket.socket, hello: bytes) -> None:
    return


def _giant(taken: socket.socket, hello: bytes) -> None:
    taken.sendall(struct.pack("<4sHHQ", b"THB1", Kind.CHALLENGE, 0, 1 << 40))


@pytest.mark.parametrize("answer", [_echo, _guess, _noise, _hang_up, _giant])
def test_another_process_at_the_port_is_no_source(source: Source, reader: Reader, answer: Answer) -> None:
    impostor = Impostor(answer)
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:"):
        reader.transport.attach(source.description(endpoint=impostor.endpoint))
    impostor.end()


WRONG_REPLIES = {
    "another number": encode_frame(Kind.BYTES, 2, bytes(SIZE)),
    "too few bytes": encode_frame(Kind.BYTES, 1, bytes(16)),
    "too many bytes": struct.pack("<4sHHQ", b"THB1", Kind.BYTES, 1, SIZE + 1) + bytes(SIZE + 1),
    "a giant refusal": struct.pack("<4sHHQ", b"THB1", Kind.REFUSED, 1, 1 << 30),
    "no reply": encode_frame(Kind.WELCOME),
    "noise": b"x" * 64,
    "half a head": encode_frame(Kind.BYTES, 1, b"")[:7],
    "a refusal": encode_frame(Kind.REFUSED, 1, b"no \x1b[2J"),
}


@pytest.mark.parametrize("reply", WRONG_REPLIES.values(), ids=WRONG_REPLIES)
def test_a_source_that_answers_wrongly_writes_nothing(source: Source, reader: Reader, reply: bytes) -> None:
    def answer(taken: socket.socket, hello: bytes) -> None:
        nonce, ours, secret = hello[HEADER_BYTES:], b"o" * 16, source.server.secret
        proof = prove(secret, "source", "source", nonce, ours)
        taken.sendall(encode_frame(Kind.CHALLENGE, 0, ours + proof))
        whole(taken, HEADER_BYTES + 32)
        taken.sendall(encode_frame(Kind.WELCOME))
        whole(taken, HEADER_BYTES + 16)
        taken.sendall(reply)

    impostor = Impostor(answer)
    peer = reader.transport.attach(source.description(endpoint=impostor.endpoint))
    error = reader.read(peer, source)
    assert str(impostor.endpoint) in error
    assert error.isprintable()
    assert (reader.memory == SENTINEL).all()
    impostor.end()
