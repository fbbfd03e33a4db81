"""Where a process is and when it began, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tensorhub_core.transport.host import Host, rdma_devices, start_ticks, this_host


def test_this_host_is_what_the_kernel_says() -> None:
    found = this_host()
    assert found is not None
    assert os.readlink("/proc/self/ns/pid") == f"pid:[{found.pid_namespace}]"
    assert os.readlink("/proc/self/ns/net") == f"net:[{found.net_namespace}]"
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_kernel_that_does_not_say(tmp_path: Path) -> None:
    assert this_host(tmp_path) is None
    assert start_ticks(1, tmp_path) is None
    assert rdma_devices(tmp_path / "absent") == ()


def test_start_of_a_process() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    began_s = psutil.Process().create_time() - psutil.boot_time()
    assert abs(ticks / os.sysconf("SC_CLK_TCK") - began_s) < 2
    assert start_ticks(2**22 + 5) is None


def test_a_command_may_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 53))
    (tmp_path / "7" / "stat").write_text(f"7 (a) R 1 (b)) S {fields}\n")
    assert start_ticks(7, tmp_path) == 22
    (tmp_path / "7" / "stat").write_text("7 (a) S 1 2\n")
    assert start_ticks(7, tmp_path) is None


def test_rdma_devices_that_can_be_used(tmp_path: Path) -> None:
    states = {"mlx5_1/ports/1": "4: ACTIVE\n", "mlx5_0/ports/1": "1: DOWN\n", "mlx5_0/ports/2": "4: ACTIVE\n"}
    for place, state in {**states, "mlx5_2/ports/1": "1: DOWN\n"}.items():
        (tmp_path / "sys" / place).mkdir(parents=True)
        (tmp_path / "sys" / place / "state").write_text(state)
    nodes = tmp_path / "dev"
    assert rdma_devices(tmp_path / "sys", nodes) == (), "a container that was given none"
    nodes.mkdir()
    assert rdma_devices(tmp_path / "sys", nodes) == ()
    (nodes / "uverbs0").touch()
    assert rdma_devices(tmp_path / "sys", nodes) == ("mlx5_0", "mlx5_1")


def test_neighbours_share_everything() -> None:
    assert Host("b", 1, 2) == Host("b", 1, 2)
    assert Host("b", 1, 2) != Host("b", 1, 3)
