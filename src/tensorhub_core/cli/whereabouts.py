"""Say where this process runs, and which NIC its bytes would take: what `doctor` finds, and how it shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tensorhub_core.cli import machine
from tensorhub_core.cli.common import printable
from tensorhub_core.client.place import Facts, Where, read_facts, settle
from tensorhub_core.errors import ConfigError
from tensorhub_core.settings import Settings
from tensorhub_core.transport.interface import Cards, check_interface
from tensorhub_core.transport.nics import RdmaPort, nearest_device, same_nic


@dataclass(frozen=True, slots=True)
class Device:
    """An RDMA device: the network interfaces of the same NIC, and where it is plugged in."""

    name: str
    interfaces: tuple[str, ...]
    pci: str
    numa_node: int | None
    active: bool


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The interfaces or RDMA devices by which other machines are read and read from, and why; none with a problem."""

    interfaces: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Everything that this module finds."""

    place: Where
    network_cards: tuple[machine.Nic, ...]
    rdma_ports: tuple[RdmaPort, ...]
    rdma_devices: tuple[Device, ...]
    data_plane: DataPlane


def examine_place(settings: Settings, between_machines: str) -> Whereabouts:
    """Look at this machine; `between_machines` is the transport that moves bytes to others."""
    facts = read_facts()
    cards = machine.network_cards(rdma=facts.rdma)
    ports = tuple(port for device in facts.rdma for port in device.ports)
    devices = tuple(
        Device(each.name, each.interfaces, each.slot.address, each.slot.numa_node, each.active) for each in facts.rdma
    )
    plane = data_plane(settings.client.interface, between_machines, cards, facts)
    return Whereabouts(settle(settings, os.environ, facts), cards, ports, devices, plane)


def data_plane(interface: str | None, transport: str, cards: Sequence[machine.Nic], facts: Facts) -> DataPlane:
    """Say which NICs the bytes take, and why. Pure."""
    if interface is not None:
        addresses = {card.name: card.addresses for card in cards if card.addresses}
        try:
            check_interface(interface, transport, Cards(facts.interfaces, facts.rdma, addresses))
        except ConfigError as error:
            return DataPlane((), str(error))
        links, ports = same_nic(interface, facts.rdma)
        return DataPlane(ports if transport == "nixl" and ports else links, "named by --interface or a setting")
    if transport == "nixl":
        return _by_rdma(facts)
    if transport == "nothing":
        return DataPlane((), "no transport moves bytes between machines")
    found = tuple(card.name for card in cards if card.addresses and card.name != "lo" and card.state != "down")
    if not found:
        return DataPlane((), "no interface but loopback has an address: only this machine can read from it")
    if len(found) == 1:
        return DataPlane(found, "the only one with an address")
    return DataPlane(found, "all are offered, and a reader takes the first that answers: name one by --interface")


def _by_rdma(facts: Facts) -> DataPlane:
    active = tuple(device.name for device in facts.rdma if device.active)
    near = None if facts.gpu is None else nearest_device(facts.gpu, facts.gpus, facts.rdma)
    if near is not None:
        return DataPlane((near.device,), f"{near.how} as this process's GPU; UCX chooses for each peer")
    gpus = [(gpu.address, nearest_device(gpu, facts.gpus, facts.rdma)) for gpu in facts.gpus]
    pairs = ", ".join(f"GPU {address}: {found.device}" for address, found in gpus if found is not None)
    return DataPlane(active, "UCX chooses for each peer, near to the memory" + (f" ({pairs})" if pairs else ""))


def place_rows(where: Where) -> Iterator[tuple[Text, Text, Text]]:
    """Yield a row for each label."""
    for name, label in (("zone", where.zone), ("host", where.host), ("rail", where.rail)):
        yield Text(f"  {name}"), Text(printable(label.value) or "unknown"), Text(printable(label.origin))


def network_rows(
    cards: Sequence[machine.Nic], ports: Sequence[RdmaPort], devices: Sequence[Device]
) -> Iterator[tuple[Text, Text, Text]]:
    """Yield a row for each interface and each RDMA port."""
    for card in cards:
        speed = "" if card.speed_mbit is None else f"{card.speed_mbit / 1000:g} Gbit/s"
        node = "" if card.numa_node is None else f"NUMA node {card.numa_node}"
        parts = (" ".join(card.addresses), speed, f"mtu {card.mtu}", node, f"rail {card.rail}" if card.rail else "")
        yield Text(f"  {card.name}"), Text(card.state), Text("  ".join(filter(None, parts)))
    nodes = {device.name: device for device in devices}
    for port in ports:
        device = nodes[port.device]
        node = "" if device.numa_node is None else f"NUMA node {device.numa_node}"
        about = "  ".join(filter(None, (port.link_layer, port.rate, node, " ".join(device.interfaces))))
        yield Text(f"  {port.device}:{port.port}"), Text(port.state), Text(about)


def used_row(plane: DataPlane) -> tuple[Text, Text, Text]:
    """Return the row for what the bytes take."""
    used = ", ".join(plane.interfaces)
    return Text("  bytes take"), Text(used or "nothing", style="green" if used else "red"), Text(plane.reason)
