"""Make transports by name; nothing of one is imported before it is asked for."""

from __future__ import annotations

import secrets

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Transport
from tensorhub_core.transport.interface import sockets_name, ucx_name
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tensorhub_core.transport.nics import read_rdma

TRANSPORTS: tuple[str, ...] = ("nixl", "tcp", "cma")
"""The transports that move bytes between processes; `auto` takes the best of them for each peer."""


def why_unavailable(name: str) -> str:
    """Return why a transport does not load on this machine, or an empty text if it does."""
    try:
        make_transport(name).shutdown()
    except TransportError as error:
        return str(error)
    return ""


def make_transport(
    name: str, *, token: str | None = None, interface: str | None = None, network: MemoryNetwork | None = None
) -> Transport:
    """Make a transport; raises TransportError if it does not load or is not known.

    `token` makes its agents' names unique (None = drawn here). `interface` names the one network interface or RDMA
    device to use, `network` the one inside this process that `memory` joins.
    """
    token = secrets.token_hex(8) if token is None else token
    if name == "auto":
        from tensorhub_core.transport.auto import AutoTransport

        return AutoTransport(token, make=lambda way: make_transport(way, token=token, interface=interface))
    if name == "nixl":
        from tensorhub_core.transport.nixl import NixlTransport

        return NixlTransport(token, interface=None if interface is None else ucx_name(interface, read_rdma()))
    if name == "tcp":
        from tensorhub_core.transport.tcp import TcpTransport

        return TcpTransport(token, interface=None if interface is None else sockets_name(interface, read_rdma()))
    if name == "cma":
        from tensorhub_core.transport.cma import CmaTransport

        return CmaTransport(token)
    if name == "memory":
        if network is None:
            raise TransportError("the memory transport moves bytes inside one process only: give it the network")
        return MemoryTransport(network)
    raise TransportError(f"there is no transport {name!r}: choose among {', '.join(('auto', *TRANSPORTS, 'memory'))}")
