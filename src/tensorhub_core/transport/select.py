"""Choose the data plane by name, and say why; `auto` goes on choosing for each peer."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_core.transport.auto import AutoTransport
from tensorhub_core.transport.base import Transport
from tensorhub_core.transport.memory import MemoryNetwork
from tensorhub_core.transport.registry import make_transport


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and, in one line, why it was taken."""

    transport: Transport
    reason: str


def choose_transport(
    name: str, *, token: str | None = None, interface: str | None = None, network: MemoryNetwork | None = None
) -> Choice:
    """Make the named transport; raises TransportError saying what is missing.

    `auto` serves in several ways and takes the best one for each peer. See `make_transport` for the other arguments. A
    `network` makes `auto` take the memory transport: whoever passes one has all peers in this process.
    """
    if name == "auto" and network is not None:
        return Choice(make_transport("memory", network=network), "memory: all peers are in this process")
    transport = make_transport(name, token=token, interface=interface, network=network)
    reason = transport.reason if isinstance(transport, AutoTransport) else "as configured"
    return Choice(transport, f"{name}: {reason}")
