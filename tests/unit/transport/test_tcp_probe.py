"""A serving side tries its own addresses before it tells them to anybody."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport import tcp_addresses
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.description import decode_description
from tensorhub_core.transport.tcp import TcpTransport
from tensorhub_core.transport.tcp_addresses import InterfaceAddress
from tensorhub_core.transport.tcp_probe import probe, reached
from tensorhub_core.transport.tcp_wire import Endpoint, decode_metadata

NOBODY = "127.0.0.1"


@pytest.fixture
def listening() -> Iterator[Endpoint]:
    with socket.create_server((NOBODY, 0)) as listener:
        yield Endpoint(NOBODY, listener.getsockname()[1])


@pytest.fixture
def closed() -> Endpoint:
    with socket.create_server((NOBODY, 0)) as listener:
        return Endpoint(NOBODY, listener.getsockname()[1])


def test_who_listens_and_who_does_not(listening: Endpoint, closed: Endpoint) -> None:
    assert probe([listening]) == {}
    assert probe([listening, closed]) == {closed: "Connection refused"}
    assert probe([]) == {}


def test_what_does_not_answer_costs_no_more_than_the_time_for_all(listening: Endpoint) -> None:
    with socket.socket() as full:  # takes no connection more than its queue
        full.bind((NOBODY, 0))
        full.listen(0)
        silent = Endpoint(NOBODY, full.getsockname()[1])
        waiting = []
        try:
            for _ in range(8):
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex((NOBODY, silent.port))
            assert probe([silent, silent, listening], 0.2) == {silent: "no answer within 0.2 s"}
        finally:
            for each in waiting:
                each.close()


def test_an_address_that_leads_nowhere_is_named_and_not_told(
    listening: Endpoint, closed: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    assert reached([], (listening, closed), None) == (listening,)
    assert str(closed) in caplog.text
    assert "--interface" in caplog.text
    assert reached([], (listening,), "lo") == (listening,)
    assert reached([], (closed,), None) == (closed,), "better than none at all"
    with pytest.raises(TransportError, match=f"'eth7' cannot be connected to.*{closed}.*--interface"):
        reached([], (closed,), "eth7")


def test_the_calls_of_the_probe_are_not_left_in_the_queue() -> None:
    with socket.create_server((NOBODY, 0)) as listener:
        endpoint = Endpoint(NOBODY, listener.getsockname()[1])
        assert reached([listener], (endpoint, endpoint), None) == (endpoint, endpoint)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_serving_side_offers_what_it_can_be_reached_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # An address that this machine has lost, as after a lease of DHCP: nothing of ours answers there.
    stale = InterfaceAddress("eth7", "240.0.0.7")
    monkeypatch.setattr(tcp_addresses, "interface_addresses", lambda: [stale, InterfaceAddress("lo", "127.0.0.1")])
    memory = np.zeros(4096, np.uint8)
    transport = TcpTransport("x")
    try:
        with caplog.at_level(logging.WARNING, "tensorhub"):
            transport.register([Region(memory.ctypes.data, memory.nbytes)])
        offer = decode_metadata(decode_description(transport.describe(), "tcp").metadata)
        assert [endpoint.address for endpoint in offer.endpoints] == ["127.0.0.1"]
        assert "240.0.0.7" in caplog.text
    finally:
        transport.shutdown()
