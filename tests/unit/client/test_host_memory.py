"""What a process can still take: the least of the machine's and its control groups' room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorhub_core.client.connect import processes_here
from tensorhub_core.client.host_memory import available_bytes

MB = 1 << 20


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_machine(tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n"})) == 2 * MB


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_the_narrowest_group_of_the_second_kind_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/jobs"
    files = {
        "proc/meminfo": f"MemAvailable: {900 * 1024} kB\n",
        "proc/self/cgroup": "0::/jobs/one\n",
        f"{group}/memory.max": f"{400 * MB}\n",
        f"{group}/memory.current": f"{150 * MB}\n",
        f"{group}/memory.stat": f"anon 1\ninactive_file {50 * MB}\nactive_file 7\n",
        f"{group}/one/memory.max": "max\n",
        f"{group}/one/memory.current": f"{100 * MB}\n",
    }
    assert available_bytes(system(tmp_path, files)) == 300 * MB


def test_a_group_of_the_first_kind(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/box"
    files = {
        "proc/meminfo": f"MemAvailable: {900 * 1024} kB\n",
        "proc/self/cgroup": "5:devices:/box\n4:cpu,memory:/box\n",
        f"{folder}/memory.limit_in_bytes": f"{64 * MB}",
        f"{folder}/memory.usage_in_bytes": f"{80 * MB}",
        f"{folder}/memory.stat": f"total_inactive_file {4 * MB}\n",
    }
    assert available_bytes(system(tmp_path, files)) == 0, "never less than nothing"


def test_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/somewhere/outside\n",
        "sys/fs/cgroup/memory.max": f"{10 * MB}",
        "sys/fs/cgroup/memory.current": f"{3 * MB}",
    }
    assert available_bytes(system(tmp_path, files)) == 7 * MB


def test_here() -> None:
    found = available_bytes()
    assert found is None or 0 < found < 1 << 50


@pytest.mark.parametrize(
    ("text", "processes"),
    [(None, 1), ("8", 8), ("0", 1), ("", 1), ("-2", 1), ("two", 1), ("²", 1), ("9" * 5000, 1), ("1", 1)],
)
def test_processes_of_a_launcher_share_the_machine(text: str | None, processes: int) -> None:
    assert processes_here({} if text is None else {"LOCAL_WORLD_SIZE": text}) == processes
