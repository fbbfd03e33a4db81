"""The outbox bounds what waits for a receiver and shares what many fetch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq

from tensorhub_core.ids import SessionId
from tensorhub_core.server import outbox as outbox_module
from tensorhub_core.server.outbox import CACHE_S, Delivery, Outbox
from tensorhub_core.state.messages import Blob, Ok
from tensorhub_core.wire.codec import decode_reply, split

MIB = 1 << 20


@dataclass
class Pair:
    router: zmq.Socket
    dealer: zmq.Socket
    session: SessionId
    outbox: Outbox

    def received(self) -> tuple[int, object]:
        assert self.dealer.poll(5000)
        frames = split(self.dealer.recv_multipart())
        return frames.request, decode_reply(frames)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 4)
            socket.setsockopt(zmq.RCVHWM, 4)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://outbox")
        dealer.connect("inproc://outbox")
        dealer.send(b"here")
        session = SessionId(router.recv_multipart()[0])
        yield Pair(router, dealer, session, Outbox(router))


def test_messages_arrive_whole_small_and_large(pair: Pair) -> None:
    blobs = [Blob(b"d%d" % size, bytes(size)) for size in (0, 1000, outbox_module.LARGE_BYTES, MIB)]
    for number, message in enumerate(blobs, 1):
        assert pair.outbox.send(pair.session, number, message, 0.0) is Delivery.SENT
        assert pair.received() == (number, message)


def test_an_unknown_receiver_is_gone(pair: Pair) -> None:
    assert pair.outbox.send(SessionId(b"nobody"), 1, Ok(), 0.0) is Delivery.GONE


def test_a_full_queue_is_slow_and_drains(pair: Pair) -> None:
    sent = 0
    while pair.outbox.send(pair.session, sent + 1, Ok(), 0.0) is Delivery.SENT:
        sent += 1
        assert sent < 100
    assert [pair.received()[0] for _ in range(sent)] == list(range(1, sent + 1)), "none was lost or torn"
    deadline = time.monotonic() + 5  # ZeroMQ notices a little later that there is room again
    while pair.outbox.send(pair.session, 99, Ok(), 0.0) is not Delivery.SENT:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert pair.received() == (99, Ok())


def test_large_bodies_are_bounded_by_their_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "SESSION_BYTES", 3 * MIB)
    sizes = [Blob(b"%d" % i, bytes(MIB - 100)) for i in range(4)]
    outcomes = [pair.outbox.send(pair.session, 1, blob, 0.0) for blob in sizes]
    assert outcomes == [Delivery.SENT] * 3 + [Delivery.SLOW]
    assert pair.outbox.send(pair.session, 1, Ok(), 0.0) is Delivery.SENT, "small ones still pass"
    pair.outbox.forget(pair.session)
    assert pair.outbox._waiting == {}


def test_many_readers_of_a_blob_share_its_body_for_a_while(pair: Pair) -> None:
    message = Blob(b"digest", b"\x07" * MIB)
    encoded = [pair.outbox._encode(number, message, 0.0) for number in range(1, 6)]
    assert len({id(body) for _, body in encoded}) == 1
    for number, frames in enumerate(encoded, 1):
        assert split(frames).request == number
        assert decode_reply(split(frames)) == message
    pair.outbox.sweep(CACHE_S / 2)
    assert pair.outbox._encode(9, message, 1.0)[1] is encoded[0][1]
    pair.outbox.sweep(1.0 + 2 * CACHE_S)
    assert pair.outbox._encode(9, message, 20.0)[1] is not encoded[0][1]


def test_the_shared_bodies_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "CACHE_BYTES", 3 * MIB)
    for index in range(10):
        pair.outbox._encode(1, Blob(b"%d" % index, bytes(MIB)), 0.0)
        assert pair.outbox._cached_bytes <= 3 * MIB
        assert pair.outbox._cached_bytes == sum(len(body) for body, _ in pair.outbox._bodies.values())
