"""Choose the data plane by name, or the best one that this machine has, and say why."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Transport
from tensorhub_core.transport.memory import MemoryNetwork
from tensorhub_core.transport.registry import TRANSPORTS, make_transport


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and, in one line, why it was taken."""

    transport: Transport
    reason: str


def choose_transport(
    name: str, *, token: str | None = None, interface: str | None = None, network: MemoryNetwork | None = None
) -> Choice:
    """Make the named transport, or for `auto` the first one that loads; raises TransportError saying what is missing.

    See `make_transport` for the other arguments. A `network` makes `auto` take the memory transport: whoever passes one
    has all peers in this process.
    """
    if name != "auto":
        return Choice(make_transport(name, token=token, interface=interface, network=network), f"{name}: as configured")
    if network is not None:
        return Choice(make_transport("memory", network=network), "memory: all peers are in this process")
    refusals = []
    for candidate in TRANSPORTS:
        try:
            transport = make_transport(candidate, token=token, interface=interface)
        except TransportError as error:
            refusals.append(f"{candidate}: {error}")
        else:
            return Choice(transport, f"{candidate}: the best that loads here")
    raise TransportError("no transport loads on this machine: " + "; ".join(refusals))
