"""Where a tcp source is looked for, and how its connections are set up."""

from __future__ import annotations

import socket

import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport import tcp_addresses
from tensorhub_core.transport.host import Host
from tensorhub_core.transport.tcp_addresses import (
    InterfaceAddress,
    interface_addresses,
    listen,
    order_of_trying,
    share_loopback,
    tune,
)
from tensorhub_core.transport.tcp_wire import MOST_ENDPOINTS, Endpoint


def test_loopback_is_tried_first_where_it_leads_to_the_source_and_nowhere_else() -> None:
    near = [Endpoint("127.0.0.1", 5), Endpoint("::1", 5)]
    far = [Endpoint("10.0.0.1", 5), Endpoint("fd00::1", 5)]
    assert order_of_trying([*far, *near], same_host=True) == [near, far]
    assert order_of_trying([*far, *near], same_host=False) == [far]
    assert order_of_trying(near, same_host=False) == []


def test_who_shares_a_loopback() -> None:
    here = Host("boot", 1, 2)
    assert share_loopback(here, Host("boot", 1, 2))
    assert share_loopback(here, Host("boot", 9, 2)), "containers of one pod"
    assert not share_loopback(here, Host("boot", 1, 3))
    assert not share_loopback(here, Host("other", 1, 2))
    assert not share_loopback(None, None)


def test_the_interfaces_of_this_machine() -> None:
    found = interface_addresses()
    assert InterfaceAddress("lo", "127.0.0.1") in found
    assert [each.loopback for each in found] == sorted(each.loopback for each in found)
    assert not any(each.address.startswith("fe80:") for each in found)


def test_many_addresses_are_cut_down_without_losing_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [InterfaceAddress(f"eth{number}", f"10.0.0.{number}") for number in range(200)]
    monkeypatch.setattr(tcp_addresses, "interface_addresses", lambda: [*many, InterfaceAddress("lo", "127.0.0.1")])
    listeners, endpoints = listen(None)
    listeners[0].close()
    assert len(endpoints) == MOST_ENDPOINTS
    assert endpoints[-1].address == "127.0.0.1"


def test_without_any_interface_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_addresses, "interface_addresses", lambda: [])
    with pytest.raises(TransportError, match="no network interface is up"):
        listen(None)


def test_a_connection_sends_at_once_and_notices_a_machine_that_is_gone() -> None:
    with socket.socket() as opened:
        tune(opened)
        options = {
            name: opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert options == {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 30_000,
    }
