"""Read which network interfaces, RDMA devices and GPUs a machine has and how near they are; the choice is pure.

Only the kernel's tree of devices is read (sysfs), nothing is opened. What it does not say is None or empty.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_DEVICE = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GPU_VENDORS = ("0x10de", "0x1002")
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380")
_MOST_GIDS = 16
"""Entries of a port's table in which its network interface is looked for: the first ones name it."""
DOWN = ("down", "lowerlayerdown", "notpresent")
"""States of an interface that moves nothing; `unknown` is one whose driver does not say, such as loopback."""
NEARNESS = ("behind the same PCIe switch", "at the same PCIe root", "on the same NUMA node", "on another NUMA node")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a device is plugged in: `path` from the PCI root to the device itself, empty if it is on no PCI bus."""

    path: tuple[str, ...] = ()
    numa_node: int | None = None

    @property
    def address(self) -> str:
        """Return the PCI address, such as `0000:8d:00.0`."""
        return self.path[-1] if self.path else ""


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface; `speed_mbit` is None where the driver does not say."""

    name: str
    state: str
    mtu: int | None = None
    speed_mbit: int | None = None
    slot: Slot = Slot()

    @property
    def up(self) -> bool:
        """Tell whether it may move bytes."""
        return self.state not in DOWN


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device, as the kernel describes it."""

    device: str
    port: str
    state: str
    rate: str
    link_layer: str


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """An RDMA device, and the network interfaces of the same NIC."""

    name: str
    ports: tuple[RdmaPort, ...] = ()
    interfaces: tuple[str, ...] = ()
    slot: Slot = Slot()

    @property
    def active(self) -> bool:
        """Tell whether one of its ports has a link."""
        return any(port.state == "active" for port in self.ports)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The RDMA device of a GPU, and how near it is."""

    device: str
    how: str


def nearness(one: Slot, other: Slot) -> tuple[int, int]:
    """Return how far apart two devices are, as a key to sort by: an index into NEARNESS, and hops through bridges."""
    common = 0
    while common < min(len(one.path), len(other.path)) and one.path[common] == other.path[common]:
        common += 1
    hops = len(one.path) + len(other.path) - 2 * common
    if common >= 2:
        return 0, hops
    if common == 1:
        return 1, hops
    known = one.numa_node is not None and one.numa_node == other.numa_node
    return (2 if known else 3), 0


def nearest_device(gpu: Slot, gpus: Sequence[Slot], devices: Sequence[RdmaDevice]) -> Nearest | None:
    """Return the RDMA device with a link that is nearest to a GPU; None if there is none.

    GPUs with the same choice of several share them in the order of their PCI addresses: or all would take the first.
    """
    mine = _equally_near(gpu, devices)
    if not mine:
        return None
    alike = sorted({each.address for each in (*gpus, gpu) if _equally_near(each, devices) == mine})
    chosen = mine[alike.index(gpu.address) % len(mine)]
    return Nearest(chosen.name, NEARNESS[nearness(gpu, chosen.slot)[0]])


def _equally_near(gpu: Slot, devices: Sequence[RdmaDevice]) -> list[RdmaDevice]:
    found = sorted((device for device in devices if device.active), key=lambda device: _natural(device.name))
    least = min((nearness(gpu, device.slot) for device in found), default=None)
    return [device for device in found if nearness(gpu, device.slot) == least]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def same_nic(name: str, devices: Sequence[RdmaDevice]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the network interfaces, and the ports as UCX names them, of the NIC that a name of either kind means.

    `ib0`, `mlx5_0` and `mlx5_0:1` may be one NIC: our own sockets know it by the first name, RDMA by the last one.
    """
    asked, _, number = name.partition(":")
    for device in devices:
        if device.name == asked or name in device.interfaces:
            ports = tuple(f"{device.name}:{port.port}" for port in device.ports if number in ("", port.port))
            return (tuple(device.interfaces), ports) if ports else ((name,), ())
    return (name,), ()


def read_interfaces(folder: Path = SYSFS / "class/net") -> tuple[Interface, ...]:
    """List the network interfaces."""
    return tuple(
        Interface(
            path.name,
            text_of(path / "operstate") or "unknown",
            _number(path / "mtu"),
            _positive(_number(path / "speed")),
            _slot(path / "device"),
        )
        for path in _children(folder)
        if path.is_dir()
    )


def read_rdma(folder: Path = SYSFS / "class/infiniband") -> tuple[RdmaDevice, ...]:
    """List the RDMA devices."""
    return tuple(
        RdmaDevice(device.name, _ports(device), _interfaces(device), _slot(device / "device"))
        for device in _children(folder)
    )


def read_gpus(sysfs: Path = SYSFS) -> tuple[Slot, ...]:
    """List where the GPUs are plugged in."""
    return tuple(
        _slot(path)
        for path in _children(sysfs / "bus/pci/devices")
        if text_of(path / "vendor") in _GPU_VENDORS and (text_of(path / "class") or "")[:6] in _GPU_CLASSES
    )


def read_slot(address: str, sysfs: Path = SYSFS) -> Slot:
    """Return where the device with a PCI address is plugged in; nowhere if it is not seen here."""
    return _slot(sysfs / "bus/pci/devices" / address.lower())


def text_of(path: Path) -> str | None:
    """Return what a small file says, without white space around it; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _ports(device: Path) -> tuple[RdmaPort, ...]:
    return tuple(
        RdmaPort(
            device.name,
            port.name,
            (text_of(port / "state") or "unknown").split(": ")[-1].lower(),
            text_of(port / "rate") or "unknown",
            text_of(port / "link_layer") or "unknown",
        )
        for port in _children(device / "ports")
    )


def _interfaces(device: Path) -> tuple[str, ...]:
    """Return the network interfaces of an RDMA device: those the ports' tables name, also a bond, and its siblings."""
    found = dict.fromkeys(path.name for path in _children(device / "device/net"))
    for port in _children(device / "ports"):
        for number in range(_MOST_GIDS):
            name = text_of(port / "gid_attrs/ndevs" / str(number))
            if name:
                found[name] = None
    return tuple(found)


def _slot(path: Path) -> Slot:
    """Return where a device is, from the place in the tree that a link to it leads to."""
    with contextlib.suppress(OSError, RuntimeError):
        where = path.resolve(strict=True)
        parts = [part for part in where.parts if _ROOT.fullmatch(part) or _DEVICE.fullmatch(part)]
        node = next((n for p in (where, *where.parents) if (n := _number(p / "numa_node")) is not None), None)
        return Slot(tuple(parts), node if node is not None and node >= 0 else None)
    return Slot()


def _children(folder: Path) -> list[Path]:
    try:
        return sorted((folder / name for name in os.listdir(folder)), key=lambda path: _natural(path.name))
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = text_of(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None
