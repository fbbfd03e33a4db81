"""Find out where this machine can be reached, listen there, and in which order a reader tries what a source offers."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.host import Host
from tensorhub_core.transport.tcp_wire import MOST_ENDPOINTS, Endpoint

USER_TIMEOUT_S = 30
"""How long a connection may make no progress before the kernel, or the sender, gives it up."""
_KEEPALIVE = (
    ("TCP_KEEPIDLE", 1),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", USER_TIMEOUT_S * 1000),
)
_BACKLOG = 512
_IS_UP = 0x1


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """A numeric address of a network interface that is up."""

    interface: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        """Return AF_INET or AF_INET6."""
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    @property
    def loopback(self) -> bool:
        """Tell whether only this machine can use it."""
        return ipaddress.ip_address(self.address).is_loopback


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3)."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interface_addresses() -> list[InterfaceAddress]:
    """Return the IPv4 and the not only link-local IPv6 addresses of all interfaces that are up; loopback last."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise TransportError(f"the network interfaces cannot be listed: {os.strerror(ctypes.get_errno())}")
    try:
        found = list(_usable(first))
    finally:
        libc.freeifaddrs(first)
    return sorted(found, key=lambda each: each.loopback)


def _usable(entry: Any) -> Iterator[InterfaceAddress]:
    while entry:
        here = entry.contents
        if here.address and here.flags & _IS_UP:
            address = _numeric(here.address)
            if address is not None:
                yield InterfaceAddress(os.fsdecode(here.name), address)
        entry = here.next


def _numeric(sockaddr: int) -> str | None:
    (family,) = struct.unpack("=H", ctypes.string_at(sockaddr, 2))
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        address = socket.inet_ntop(family, ctypes.string_at(sockaddr + 8, 16))
        return None if ipaddress.ip_address(address).is_link_local else address
    return None


def share_loopback(one: Host | None, other: Host | None) -> bool:
    """Tell whether both have the same loopback: a machine and, of it, a network namespace."""
    if one is None or other is None:
        return False
    return (one.boot_id, one.net_namespace) == (other.boot_id, other.net_namespace)


def order_of_trying(endpoints: Sequence[Endpoint], same_host: bool) -> list[list[Endpoint]]:
    """Return groups of endpoints, each to be tried at once and after the one before it has failed.

    A loopback address leads to another machine's source only by mistake, so elsewhere it is not tried at all.
    """
    near = [endpoint for endpoint in endpoints if endpoint.loopback and same_host]
    far = [endpoint for endpoint in endpoints if not endpoint.loopback]
    return [group for group in (near, far) if group]


def listen(interface: str | None) -> tuple[list[socket.socket], tuple[Endpoint, ...]]:
    """Listen on every interface, or on the addresses of one; returns the sockets and where they can be reached.

    Raises TransportError if the interface has no address, or nothing can be listened on.
    """
    addresses = interface_addresses()
    if interface is not None:
        return _listen_on([each for each in addresses if each.interface == interface][:MOST_ENDPOINTS], interface)
    listener = _listen_everywhere()
    port = listener.getsockname()[1]
    usable = [each for each in addresses if each.family == listener.family or each.family == socket.AF_INET]
    if len(usable) > MOST_ENDPOINTS:  # the loopback ones, which are last, stay
        near = [each for each in usable if each.loopback][:MOST_ENDPOINTS]
        usable = [each for each in usable if not each.loopback][: MOST_ENDPOINTS - len(near)] + near
    if not usable:
        listener.close()
        raise TransportError("no network interface is up, not even loopback: peers cannot reach this machine")
    return [listener], tuple(Endpoint(each.address, port) for each in usable)


def _listen_everywhere() -> socket.socket:
    try:
        # IPv4 is served by the same socket.
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    except (OSError, ValueError):
        pass  # IPv6 is switched off
    try:
        return socket.create_server(("0.0.0.0", 0), backlog=_BACKLOG)
    except OSError as error:
        raise TransportError(f"no port can be listened on: {error}") from None


def _listen_on(
    addresses: Sequence[InterfaceAddress], interface: str
) -> tuple[list[socket.socket], tuple[Endpoint, ...]]:
    if not addresses:
        raise TransportError(f"the network interface {interface!r} has no address, or is not up: see `ip address`")
    listeners: list[socket.socket] = []
    try:
        for each in addresses:
            listeners.append(socket.create_server((each.address, 0), family=each.family, backlog=_BACKLOG))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise TransportError(f"the address {each.address} of {interface!r} cannot be listened on: {error}") from None
    ports = [listener.getsockname()[1] for listener in listeners]
    return listeners, tuple(Endpoint(each.address, port) for each, port in zip(addresses, ports, strict=True))


def new_selector() -> selectors.BaseSelector:
    """Return a selector that takes no file of its own: it is needed most where there are none left."""
    return getattr(selectors, "PollSelector", selectors.SelectSelector)()


def tune(connection: socket.socket) -> None:
    """Send small frames at once, and notice when the other machine is gone. Buffers are left to the kernel's tuning."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
