"""What `doctor` finds out about a machine is what the kernel says, and what cannot be found out has a reason."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tensorhub_core.cli import machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_network_cards_are_those_of_the_kernel() -> None:
    cards = {card.name: card for card in machine.network_cards()}
    assert set(cards) == {name for _, name in socket.if_nameindex()}
    assert cards["lo"].address == "127.0.0.1"


def test_a_card_of_known_speed(tmp_path: Path) -> None:
    write(tmp_path / "eth7" / "operstate", "up\n")
    write(tmp_path / "eth7" / "speed", "100000\n")
    write(tmp_path / "eth7" / "mtu", "9000\n")
    write(tmp_path / "eth8" / "speed", "-1\n")
    assert machine.network_cards(tmp_path) == (
        machine.Nic("eth7", "up", None, 9000, 100_000),
        machine.Nic("eth8", "unknown", None, None, None),
    )


def test_rdma_ports_as_the_kernel_describes_them(tmp_path: Path) -> None:
    write(tmp_path / "mlx5_0" / "ports" / "1" / "state", "4: ACTIVE\n")
    write(tmp_path / "mlx5_0" / "ports" / "1" / "rate", "400 Gb/sec (4X NDR)\n")
    write(tmp_path / "mlx5_0" / "ports" / "1" / "link_layer", "InfiniBand\n")
    assert machine.rdma_ports(tmp_path) == (
        machine.RdmaPort("mlx5_0", "1", "active", "400 Gb/sec (4X NDR)", "InfiniBand"),
    )
    assert machine.rdma_ports(tmp_path / "absent") == ()


def test_limits_and_memory() -> None:
    found = machine.limits()
    assert found.available_memory_bytes is not None
    assert 0 < found.available_memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_child_reads_this_process_or_the_reason_is_said() -> None:
    found = machine.cross_memory()
    assert found.works == (found.reason == "")


def test_a_kernel_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_READ_PARENT", 'print("errno 1")')
    found = machine.cross_memory()
    assert not found.works
    assert found.reason.startswith("the kernel refuses: Operation not permitted")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", "died of signal 11"),
        ("raise SystemExit('UCX does not start')", "UCX does not start"),
        ("print('nothing')", "UCX lists no device"),
    ],
)
def test_a_ucx_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, script: str, reason: str) -> None:
    monkeypatch.setattr(machine, "_LIST_UCX", script)
    monkeypatch.setattr(machine, "_ucx_library", lambda: Path("libucp.so"))
    found = machine.ucx()
    assert found.devices == ()
    assert reason in found.reason


def test_ucx_of_the_nixl_wheel() -> None:
    pytest.importorskip("nixl")
    found = machine.ucx()
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.version or "")
    assert "tcp/lo" in found.devices
