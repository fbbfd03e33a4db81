"""Reading over tcp: which addresses are tried, what a description lets be read, and what ends a read."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport import tcp_serving, tcp_waiting
from tensorhub_core.transport.base import ReadState, Region
from tensorhub_core.transport.tcp import TcpTransport
from tensorhub_core.transport.tcp_addresses import listen
from tensorhub_core.transport.tcp_reading import TcpConnection
from tensorhub_core.transport.tcp_wire import Endpoint, TcpOffer
from tests.transport.lab import SENTINEL, batch
from tests.transport.tcp_sides import MIB, Side, described, offer_of, seeded

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def make(size: int = MIB, seed: int | None = None) -> Side:
        content = np.full(size, SENTINEL, np.uint8) if seed is None else seeded(seed, size)
        made.append(Side(content, f"test{len(made)}"))
        return made[-1]

    yield make
    for side in made:
        side.transport.shutdown()


def test_the_interface_decides_where_it_listens() -> None:
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(TransportError, match="'nowhere0' has no address"):
        TcpTransport("x", interface="nowhere0").register([Region(memory.ctypes.data, 4096)])
    listeners, endpoints = listen("lo")
    for listener in listeners:
        listener.close()
    assert endpoints
    assert all(endpoint.loopback for endpoint in endpoints)
    everywhere, endpoints = listen(None)
    everywhere[0].close()
    assert endpoints[-1].loopback
    assert len({endpoint.port for endpoint in endpoints}) == 1


def test_addresses_are_tried_together_and_named_if_all_fail(sides: Callable[..., Side]) -> None:
    serving, side = sides(4096, seed=11), sides(4096)
    agent, offer = offer_of(serving)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        quiet, refused = (Endpoint("127.0.0.1", each.getsockname()[1]) for each in (silent, gone))
        gone.close()
        wrong = TcpOffer(offer.secret, offer.host, (quiet, refused), offer.regions)
        with pytest.raises(TransportError) as caught:
            side.transport.attach(described(agent, wrong))
        assert f"{quiet}: no answer within 1.0 s" in str(caught.value)
        assert f"{refused}: Connection refused" in str(caught.value)
        right = TcpOffer(offer.secret, offer.host, (quiet, refused, *offer.endpoints), offer.regions)
        assert np.array_equal(
            side.read(side.transport.attach(described(agent, right)), serving.at, 4096), serving.memory
        )
    elsewhere = TcpOffer(offer.secret, None, tuple(e for e in offer.endpoints if e.loopback), offer.regions)
    with pytest.raises(TransportError, match="own machine only"):
        sides(16).transport.attach(described(agent, elsewhere))


def test_a_pause_of_the_reader_while_it_connects_is_no_silence_of_the_peer(
    sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, side = sides(4096, seed=12), sides(4096)
    waits, wait, serve, asked = [0], tcp_waiting._wait, tcp_serving._Connection._run, threading.Event()

    def answers_later(connection: tcp_serving._Connection) -> None:
        asked.wait(30)  # so that one look is not enough, however late it comes
        serve(connection)

    def paused(connections: Sequence[TcpConnection], timeout_s: float) -> None:
        waits[0] += 1
        if waits[0] == 2:
            asked.set()
        if waits[0] <= 2:
            time.sleep(1.2)  # more than it may take to connect
        wait(connections, timeout_s)

    monkeypatch.setattr(tcp_waiting, "_wait", paused)
    monkeypatch.setattr(tcp_serving._Connection, "_run", answers_later)
    peer = side.transport.attach(serving.transport.describe())
    assert np.array_equal(side.read(peer, serving.at, 4096), serving.memory)
    assert waits[0] >= 2


def test_more_regions_change_no_address_and_interrupt_nobody(sides: Callable[..., Side]) -> None:
    serving, side, added = sides(16 * MIB, seed=6), sides(16 * MIB), seeded(7, 4096)
    agent, before = offer_of(serving)
    old = side.transport.attach(serving.transport.describe())
    read = side.post(old, serving.at, 16 * MIB)
    assert side.transport.poll(read).state is ReadState.ACTIVE
    serving.transport.register([Region(added.ctypes.data, added.nbytes)])
    assert (agent, before.endpoints, before.secret) == (agent, offer_of(serving)[1].endpoints, before.secret)
    with pytest.raises(TransportError, match="outside"):
        side.post(old, added.ctypes.data, 4096)
    new = side.transport.attach(serving.transport.describe())
    assert side.end_of(read) is ReadState.DONE
    assert np.array_equal(side.memory, serving.memory)
    assert np.array_equal(side.read(new, added.ctypes.data, 4096), added)
    with pytest.raises(TransportError, match="not attached"):
        side.post(old, serving.at, 16)


def test_descriptions_of_thousands_of_regions(sides: Callable[..., Side]) -> None:
    memory = seeded(5, 4 * MIB)
    serving = TcpTransport("many")
    serving.register([Region(memory.ctypes.data + at, 100) for at in range(0, 4 * MIB - 128, 128)])
    try:
        side = sides(MIB)
        peer = side.transport.attach(serving.describe())
        for at in (0, 128, 4 * MIB - 256):
            assert np.array_equal(side.read(peer, memory.ctypes.data + at, 100), memory[at : at + 100])
            with pytest.raises(TransportError, match="outside"):
                side.post(peer, memory.ctypes.data + at, 101)
    finally:
        serving.shutdown()


def test_own_memory_that_is_revoked_is_written_no_more_and_staging_memory_is(sides: Callable[..., Side]) -> None:
    serving, side = sides(16 * MIB, seed=13), sides(16 * MIB)
    staging = np.full(16 * MIB, SENTINEL, np.uint8)
    side.transport.register_local([Region(staging.ctypes.data, staging.nbytes)])
    peer = side.transport.attach(serving.transport.describe())
    kept = side.transport.post(peer, batch((staging.ctypes.data, serving.at, 16 * MIB)))
    assert side.transport.poll(kept).state is ReadState.ACTIVE
    side.transport.revoke()
    assert side.end_of(kept) is ReadState.DONE
    assert np.array_equal(staging, serving.memory)
    side.transport.register([Region(side.at, 16 * MIB)])
    lost = side.post(peer, serving.at, 16 * MIB)
    assert side.transport.poll(lost).state is ReadState.ACTIVE
    side.transport.revoke()
    side.memory[:] = SENTINEL
    assert side.end_of(lost) is ReadState.FAILED
    assert "revoked" in side.transport.poll(lost).error
    assert (side.memory == SENTINEL).all()
    with pytest.raises(TransportError, match="registered here"):
        side.post(peer, serving.at, 16)


def test_polling_the_last_read_alone_moves_those_before_it(sides: Callable[..., Side]) -> None:
    serving, side = sides(8 * MIB, seed=14), sides(8 * MIB)
    peer = side.transport.attach(serving.transport.describe())
    reads = [side.transport.post(peer, batch((side.at + at, serving.at + at, MIB))) for at in range(0, 8 * MIB, MIB)]
    assert side.end_of(reads[-1]) is ReadState.DONE
    assert np.array_equal(side.memory, serving.memory)
    assert all(side.transport.poll(read).state is ReadState.DONE for read in reads)


def test_what_is_asked_for_at_once_is_bounded(sides: Callable[..., Side]) -> None:
    serving, side = sides(MIB, seed=15), sides(MIB)
    peer = side.transport.attach(serving.transport.describe())
    many = batch(*[(side.at + at, serving.at + at, 1) for at in range(65_537)])
    with pytest.raises(TransportError, match="65,536"):
        side.transport.post(peer, many)
    run = batch((side.at, serving.at, 1))
    reads = [side.transport.post(peer, run) for _ in range(1024)]
    with pytest.raises(TransportError, match="poll them first"):
        side.transport.post(peer, run)
    assert {side.end_of(read) for read in reads} == {ReadState.DONE}
    side.transport.post(peer, run)


def test_registering_or_forgetting_memory_waits_for_the_reads(sides: Callable[..., Side]) -> None:
    serving, side = sides(MIB, seed=16), sides(MIB)
    read = side.post(side.transport.attach(serving.transport.describe()), serving.at, MIB)
    with pytest.raises(TransportError, match="close all reads"):
        side.transport.register_local([])
    with pytest.raises(TransportError, match="close all reads"):
        side.transport.deregister()
    assert side.transport.close(read)
    side.transport.deregister()


def test_waiting_alone_moves_every_byte_of_what_was_asked_for(sides: Callable[..., Side]) -> None:
    size = 5 * MIB + 77
    serving, side = sides(size, seed=17), sides(size)
    peer = side.transport.attach(serving.transport.describe())
    cuts = [0, 1, 300, 4096, MIB + 5, 3 * MIB, size]
    reads = [
        side.transport.post(peer, batch((side.at + begin, serving.at + begin, end - begin)))
        for begin, end in itertools.pairwise(cuts)
    ]
    end = time.monotonic() + 20
    while not np.array_equal(side.memory, serving.memory):
        assert time.monotonic() < end, "waiting does not move the rest"
        side.transport.wait(reads[-1:], 0.001)
    assert {side.transport.poll(read).state for read in reads} == {ReadState.DONE}
    side.transport.wait(reads[:1], 0.0)  # one that has ended


def test_where_bytes_come_slowly_who_waits_is_woken_when_the_next_read_is_there(sides: Callable[..., Side]) -> None:
    serving, side = sides(5 * MIB, seed=3), sides(5 * MIB)
    peer = side.transport.attach(serving.transport.describe())
    small = side.transport.post(peer, batch((side.at, serving.at, 300_000)))
    side.transport.post(peer, batch((side.at + MIB, serving.at + MIB, 4 * MIB)))
    connection = side.transport._reads[small].read.connection
    assert connection is not None

    def wakes_at() -> int:
        assert connection.expect_bytes()
        return connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    assert wakes_at() == MIB
    for _ in range(10):
        connection.waited(0.008)
    assert wakes_at() == 300_000
    for _ in range(10):
        connection.waited(0.0001)
    assert wakes_at() == MIB
