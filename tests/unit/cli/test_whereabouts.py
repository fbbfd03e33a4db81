"""What `doctor` says of where a process runs, and which NIC its bytes take."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

from rich.console import Console

from tensorhub_core.cli.doctor import table_of
from tensorhub_core.cli.machine import Nic
from tensorhub_core.cli.whereabouts import DataPlane, Device, data_plane, network_rows, place_rows, used_row
from tensorhub_core.client.place import Facts, Label, Where
from tensorhub_core.transport.nics import Interface, RdmaDevice, RdmaPort, Slot

GPUS = tuple(Slot(("pci0000:00", f"0000:00:0{k}.0", f"0000:1{k}:00.0"), 0) for k in range(2))
RDMA = tuple(
    RdmaDevice(
        f"mlx5_{k}",
        (RdmaPort(f"mlx5_{k}", "1", "active", "400 Gb/sec (4X NDR)", "InfiniBand"),),
        (f"ib{k}",),
        Slot((*GPUS[k].path[:2], f"0000:2{k}:00.0"), 0),
    )
    for k in range(2)
)


def nic(name: str, *addresses: str, state: str = "up", rail: str | None = None) -> Nic:
    return Nic(name, state, addresses[0] if addresses else None, 1500, 100_000, addresses, 0, rail)


def plane(interface: str | None, transport: str, cards: Sequence[Nic], facts: Facts | None = None) -> DataPlane:
    interfaces = tuple(Interface(card.name, card.state) for card in cards)
    return data_plane(interface, transport, cards, dataclasses.replace(facts or Facts(), interfaces=interfaces))


LO, ETH0, ETH1 = nic("lo", "127.0.0.1", state="unknown"), nic("eth0", "10.0.0.1"), nic("eth1", "10.1.0.1")


def test_sockets_take_the_only_interface_or_offer_all() -> None:
    assert plane(None, "tcp", [LO, ETH0]) == DataPlane(("eth0",), "the only one with an address")
    assert plane(None, "tcp", [LO, ETH0, ETH1, nic("eth2")]).interfaces == ("eth0", "eth1")
    assert "--interface" in plane(None, "tcp", [LO, ETH0, ETH1]).reason
    assert plane(None, "tcp", [LO]).interfaces == ()
    assert plane(None, "nothing", [LO, ETH0]).interfaces == ()


def test_what_is_named_is_taken_or_the_reason_is_said() -> None:
    assert plane("eth1", "tcp", [LO, ETH0, ETH1]).interfaces == ("eth1",)
    refused = plane("eth9", "tcp", [LO, ETH0])
    assert refused.interfaces == ()
    assert "no network interface 'eth9'" in refused.reason
    facts = Facts(rdma=RDMA)
    cards = [LO, ETH0, nic("ib0", "10.2.0.1")]
    assert plane("ib0", "nixl", cards, facts).interfaces == ("mlx5_0:1",)
    assert plane("mlx5_0", "tcp", cards, facts).interfaces == ("ib0",)


def test_rdma_is_taken_near_the_gpu() -> None:
    facts = Facts(rdma=RDMA, gpus=GPUS)
    told = plane(None, "nixl", [LO, ETH0], facts)
    assert told.interfaces == ("mlx5_0", "mlx5_1")
    assert "GPU 0000:10:00.0: mlx5_0, GPU 0000:11:00.0: mlx5_1" in told.reason
    mine = plane(None, "nixl", [LO, ETH0], Facts(rdma=RDMA, gpus=GPUS, gpu=GPUS[1]))
    assert mine.interfaces == ("mlx5_1",)
    assert "behind the same PCIe switch" in mine.reason


def test_it_is_shown() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    where = Where(Label("eu", "option --zone"), Label("n\x1b7", "host name"), Label("", "nothing says it"))
    devices = [Device(each.name, each.interfaces, each.slot.address, 0, True) for each in RDMA]
    console.print(table_of(place_rows(where)))
    console.print(table_of(network_rows([nic("ib0", "10.2.0.1", rail="mlx5_0")], RDMA[0].ports, devices)))
    console.print(table_of([used_row(DataPlane(("ib0",), "named"))]))
    text = " ".join(console.export_text().split())
    for part in (
        "zone eu option --zone",
        "host n\\x1b7 host name",
        "rail unknown nothing says it",
        "ib0 up 10.2.0.1 100 Gbit/s mtu 1500 NUMA node 0 rail mlx5_0",
        "mlx5_0:1 active InfiniBand 400 Gb/sec (4X NDR) NUMA node 0 ib0",
        "bytes take ib0 named",
    ):
        assert part in text
