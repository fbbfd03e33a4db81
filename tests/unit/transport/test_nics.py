"""Which RDMA device is nearest to a GPU, on trees like those of real machines, and what a NIC is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorhub_core.errors import ConfigError
from tensorhub_core.transport.interface import Cards, check_interface, sockets_name, ucx_name
from tensorhub_core.transport.nics import (
    Interface,
    RdmaDevice,
    RdmaPort,
    Slot,
    nearest_device,
    read_gpus,
    read_interfaces,
    read_rdma,
    read_slot,
)


class Sysfs:
    """A kernel's tree of devices, written into a folder with the links that the real one has."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, to: Path) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(to)

    def device(self, where: str, node: int) -> Path:
        """Add a PCI device; `where` leads from its root to it."""
        self.write(f"devices/{where}/numa_node", str(node))
        self.link(f"bus/pci/devices/{where.rpartition('/')[2]}", self.root / "devices" / where)
        return self.root / "devices" / where

    def gpu(self, where: str, node: int) -> None:
        self.device(where, node)
        self.write(f"devices/{where}/vendor", "0x10de")
        self.write(f"devices/{where}/class", "0x030200")

    def nic(self, name: str, where: str, node: int, interface: str = "", state: str = "4: ACTIVE") -> None:
        device = self.device(where, node)
        self.write(f"class/infiniband/{name}/ports/1/state", state)
        self.write(f"class/infiniband/{name}/ports/1/rate", "400 Gb/sec (4X NDR)")
        self.write(f"class/infiniband/{name}/ports/1/link_layer", "InfiniBand")
        self.link(f"class/infiniband/{name}/device", device)
        if interface:
            self.write(f"devices/{where}/net/{interface}/operstate", "up")
            self.write(f"devices/{where}/net/{interface}/speed", "400000")
            self.write(f"devices/{where}/net/{interface}/mtu", "4092")
            self.link(f"devices/{where}/net/{interface}/device", device)
            self.link(f"class/net/{interface}", device / "net" / interface)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def chosen(sysfs: Sysfs, gpu: str) -> tuple[str, str]:
    found = nearest_device(
        read_slot(gpu, sysfs.root), read_gpus(sysfs.root), read_rdma(sysfs.root / "class/infiniband")
    )
    assert found is not None
    return found.device, found.how


def switched(sysfs: Sysfs, per_switch: int) -> list[str]:
    """Build 8 GPUs and 8 NICs behind PCIe switches, 4 of each at either socket; return the GPUs' addresses.

    NICs are named against the order of the GPUs, so that equal numbers are no help.
    """
    gpus = []
    for index in range(8):
        node, switch = index // 4, index // per_switch
        above = f"pci0000:{0x10 + switch:02x}/0000:{0x10 + switch:02x}:01.0/0000:{0x20 + switch:02x}:00.0"
        slot = 2 * (index % per_switch)
        gpus.append(f"0000:{0x30 + switch:02x}:{slot:02x}.0")
        sysfs.gpu(f"{above}/0000:{0x22 + switch:02x}:{slot:02x}.0/{gpus[-1]}", node)
        port = f"{above}/0000:{0x22 + switch:02x}:{slot + 1:02x}.0"
        sysfs.nic(f"mlx5_{7 - index}", f"{port}/0000:{0x40 + switch:02x}:{slot + 1:02x}.0", node, f"ib{index}")
    return gpus


def test_each_of_eight_gpus_takes_the_nic_behind_its_own_switch(sysfs: Sysfs) -> None:
    gpus = switched(sysfs, per_switch=1)
    near = "behind the same PCIe switch"
    assert [chosen(sysfs, gpu) for gpu in gpus] == [(f"mlx5_{7 - k}", near) for k in range(8)]


def test_gpus_that_share_a_switch_share_its_nics_and_never_all_take_one(sysfs: Sysfs) -> None:
    gpus = switched(sysfs, per_switch=2)
    found = [chosen(sysfs, gpu)[0] for gpu in gpus]
    assert sorted(found) == [f"mlx5_{k}" for k in range(8)]
    assert [{*found[k : k + 2]} for k in range(0, 8, 2)] == [{f"mlx5_{7 - k}", f"mlx5_{6 - k}"} for k in range(0, 8, 2)]


def test_a_nic_without_a_link_is_not_taken(sysfs: Sysfs) -> None:
    gpus = switched(sysfs, per_switch=1)
    sysfs.write("class/infiniband/mlx5_7/ports/1/state", "1: DOWN")
    device, how = chosen(sysfs, gpus[0])
    assert device != "mlx5_7"
    assert how == "on the same NUMA node"
    assert device in {"mlx5_4", "mlx5_5", "mlx5_6"}


def test_a_virtual_machine_that_shows_no_switches_still_spreads_its_gpus(sysfs: Sysfs) -> None:
    for k in range(8):
        sysfs.gpu(f"pci{k:04x}:00/{k:04x}:00:00.0", -1)
        sysfs.nic(f"mlx5_ib{k}", f"pci{k + 16:04x}:00/{k + 16:04x}:00:00.0", -1)
    found = [chosen(sysfs, f"{k:04x}:00:00.0") for k in range(8)]
    assert found == [(f"mlx5_ib{k}", "on another NUMA node") for k in range(8)]


def test_ten_nics_come_in_the_order_of_their_numbers(sysfs: Sysfs) -> None:
    for k in range(12):
        sysfs.gpu(f"pci{k:04x}:00/{k:04x}:00:00.0", -1)
        sysfs.nic(f"mlx5_{k}", f"pci{k + 16:04x}:00/{k + 16:04x}:00:00.0", -1)
    assert [chosen(sysfs, f"{k:04x}:00:00.0")[0] for k in range(12)] == [f"mlx5_{k}" for k in range(12)]


def test_a_machine_without_rdma_has_no_nearest_device(sysfs: Sysfs) -> None:
    sysfs.gpu("pci0000:00/0000:00:05.0", 0)
    slot = read_slot("0000:00:05.0", sysfs.root)
    assert nearest_device(slot, read_gpus(sysfs.root), read_rdma(sysfs.root / "class/infiniband")) is None
    assert read_slot("0000:99:00.0", sysfs.root) == Slot()


def test_a_nic_is_read_with_both_its_names(sysfs: Sysfs) -> None:
    sysfs.nic("mlx5_0", "pci0000:10/0000:11:00.0", 1, "ib0")
    sysfs.write("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "ib0")
    sysfs.write("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1", "bond0")
    (device,) = read_rdma(sysfs.root / "class/infiniband")
    assert device.interfaces == ("ib0", "bond0")
    assert device.slot == Slot(("pci0000:10", "0000:11:00.0"), 1)
    (interface,) = read_interfaces(sysfs.root / "class/net")
    assert interface == Interface("ib0", "up", 4092, 400_000, device.slot)
    assert read_interfaces(sysfs.root / "absent") == read_rdma(sysfs.root / "absent") == ()


DEVICES = (
    RdmaDevice("mlx5_0", (RdmaPort("mlx5_0", "1", "active", "400 Gb/sec (4X NDR)", "InfiniBand"),), ("ib0",)),
    RdmaDevice("mlx5_1", (RdmaPort("mlx5_1", "1", "down", "40 Gb/sec", "InfiniBand"),)),
)
INTERFACES = (
    Interface("eth0", "up"),
    Interface("eth1", "down"),
    Interface("eth2", "up"),
    Interface("ib0", "up"),
    Interface("lo", "unknown"),
)
HERE = Cards(INTERFACES, DEVICES, {"eth0": ["10.0.0.7"], "ib0": ["10.1.0.7"], "lo": ["127.0.0.1"]})


@pytest.mark.parametrize("transport", ["auto", "nixl", "tcp"])
@pytest.mark.parametrize("name", ["eth0", "ib0", "lo"])
def test_interfaces_that_can_be_used(name: str, transport: str) -> None:
    check_interface(name, transport, HERE)


def test_an_rdma_device_needs_no_address_for_rdma() -> None:
    bare = Cards((Interface("eth0", "up"),), DEVICES, {"eth0": ["10.0.0.7"]})
    for name in ("mlx5_0", "mlx5_0:1"):
        check_interface(name, "auto", bare)
        check_interface(name, "nixl", bare)
        check_interface(name, "tcp", HERE)
    with pytest.raises(ConfigError, match="'mlx5_0' has no network interface of its own for tcp"):
        check_interface("mlx5_0", "tcp", bare)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("eth9", "there is no network interface or RDMA device 'eth9'"),
        ("mlx5_0:2", "there is no network interface or RDMA device 'mlx5_0:2'"),
        ("eth1", "the interface 'eth1' is down"),
        ("eth2", "the interface 'eth2' has no address"),
        ("mlx5_1", "the RDMA device 'mlx5_1' has no port with a link"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_there_is(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_interface(name, "auto", HERE)
    said = str(refused.value)
    assert said.startswith(why)
    for part in ("mlx5_0:1 (400 Gb/sec (4X NDR))", "eth0 (10.0.0.7)", "eth1 (down)", "--interface", "mlx5_1:1 (down)"):
        assert part in said
    check_interface(name, "cma", HERE)


def test_each_transport_is_told_its_own_name_of_a_nic() -> None:
    for name in ("ib0", "mlx5_0", "mlx5_0:1"):
        assert (sockets_name(name, DEVICES), ucx_name(name, DEVICES)) == ("ib0", "mlx5_0:1")
    assert (sockets_name("eth0", DEVICES), ucx_name("eth0", DEVICES)) == ("eth0", "eth0")
    assert (sockets_name("mlx5_1", DEVICES), ucx_name("mlx5_1", DEVICES)) == ("mlx5_1", "mlx5_1:1")
