"""Check the network interface that a user names for the data plane, and say what it is called by each transport.

`eth0` is a network interface, `mlx5_0` or `mlx5_0:1` an RDMA device or a port of one. A NIC may have both names; then
either means both, because our own sockets know it by the one and RDMA by the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorhub_core.errors import ConfigError, TransportError
from tensorhub_core.transport.nics import Interface, RdmaDevice, read_interfaces, read_rdma, same_nic
from tensorhub_core.transport.tcp_addresses import interface_addresses

_MOST_NAMED = 32
OPTION = "--interface, TENSORHUB_INTERFACE or settings={'interface': ...}"


@dataclass(frozen=True, slots=True)
class Cards:
    """What a machine has; `addresses` are those of the interfaces that are up."""

    interfaces: Sequence[Interface]
    devices: Sequence[RdmaDevice]
    addresses: Mapping[str, Sequence[str]]


def read_cards() -> Cards:
    """Look at this machine as this process sees it; raises TransportError if its addresses cannot be listed."""
    addresses: dict[str, list[str]] = {}
    for each in interface_addresses():
        addresses.setdefault(each.interface, []).append(each.address)
    return Cards(read_interfaces(), read_rdma(), addresses)


def addresses_of(interface: str | None) -> tuple[str, ...]:
    """Return the interfaces by which this machine can be reached and their addresses; of one, if one is named."""
    try:
        found = [each for each in interface_addresses() if interface is None or each.interface == interface]
    except TransportError:
        found = []
    far = [each for each in found if not each.loopback]
    return tuple(f"{each.interface} {each.address}" for each in far or found) or ((interface,) if interface else ())


def check_interface(name: str, transport: str, cards: Cards) -> None:
    """Raise ConfigError, which names what there is, unless a transport can use this interface. Pure."""
    if transport in ("cma", "memory"):
        return
    links, ports = same_nic(name, cards.devices)
    known = [each for each in cards.interfaces if each.name in links]
    states = {f"{port.device}:{port.port}": port.state for device in cards.devices for port in device.ports}
    asked = name.partition(":")[0]
    if not known and not ports:
        device = " or RDMA device" if cards.devices else ""
        raise ConfigError(f"there is no network interface{device} {name!r}: {_choices(cards)}")
    if transport != "tcp" and any(states[port] == "active" for port in ports):
        return
    if not any(cards.addresses.get(each.name) and each.up for each in known):
        what = f"the RDMA device {name!r}" if asked in {d.name for d in cards.devices} else f"the interface {name!r}"
        if any(each.up and not cards.addresses.get(each.name) for each in known):
            why = "has no address, or is switched off"
        elif known:
            why = f"is {known[0].state}: it has no link, or is switched off"
        else:
            why = "has no port with a link" if transport != "tcp" else "has no network interface of its own for tcp"
        raise ConfigError(f"{what} {why}: {_choices(cards)}")


def sockets_name(name: str, devices: Sequence[RdmaDevice]) -> str:
    """Return what our own sockets call a NIC."""
    links = same_nic(name, devices)[0]
    return name if name in links or not links else links[0]


def ucx_name(name: str, devices: Sequence[RdmaDevice]) -> str:
    """Return what UCX calls a NIC: a port of its RDMA device, one with a link if there is one, else its interface."""
    ports = same_nic(name, devices)[1]
    active = {f"{port.device}:{port.port}" for device in devices for port in device.ports if port.state == "active"}
    return next((port for port in ports if port in active), ports[0] if ports else name)


def _choices(cards: Cards) -> str:
    """Say which interfaces there are, the usable ones first."""
    found = [*_devices(cards)]
    for each in sorted(cards.interfaces, key=lambda each: (not cards.addresses.get(each.name), each.name == "lo")):
        addresses = ", ".join(cards.addresses.get(each.name, ())[:2])
        found.append(f"{each.name} ({(addresses or 'no address') if each.up else each.state})")
    return f"there are {', '.join(found[:_MOST_NAMED]) or 'none'}; choose by {OPTION}"


def _devices(cards: Cards) -> Iterator[str]:
    for device in cards.devices:
        for port in device.ports:
            yield f"{device.name}:{port.port} ({port.rate if port.state == 'active' else port.state})"
