"""The memory that `pull` fills has the version's layout, and is refused when there is no room for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorhub_core.checkpoint.inventory import Inventory
from tensorhub_core.checkpoint.room import allocate, available_memory_bytes, check_room
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.types import TensorSpec

SPECS = (
    TensorSpec("a", "bfloat16", (3, 5)),
    TensorSpec("b", "float8_e4m3fn", (7,)),
    TensorSpec("empty", "float32", (0, 4)),
    TensorSpec("scalar", "int64", ()),
    TensorSpec("tied", "bfloat16", (3, 5)),
)


def test_memory_has_the_fingerprint_of_the_holder(tmp_path: Path) -> None:
    tensors, total_bytes = allocate(Inventory("trainer", SPECS, (("a", "tied"),), 8192), tmp_path / "out")
    memory = RegisteredMemory(((t.name, t) for t in tensors), segment_bytes=8192)
    expected = build_layout(SPECS, [("a", "tied")], shard=0, num_shards=1, segment_bytes=8192)
    assert memory.layout == expected
    assert total_bytes == 3 * 64
    by_name = {t.name: t.buffer for t in tensors}
    assert by_name["a"].ctypes.data == by_name["tied"].ctypes.data
    by_name["a"][:] = np.arange(30)
    assert by_name["b"].tolist() == [0] * 7
    assert len(memory.regions()) == 1
    memory.check_writable()


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_no_room(tmp_path: Path, what: str) -> None:
    memory_bytes, disk_bytes = (1 << 60, 1) if what == "memory" else (1, 1 << 60)
    with pytest.raises(ConfigError, match=rf"needs 1\.2 EB of {what}"):
        check_room(memory_bytes, disk_bytes, tmp_path / "absent" / "out")


def test_available_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       100 kB\nMemAvailable:    42 kB\n")
    assert available_memory_bytes(tmp_path / "meminfo") == 42 * 1024
    assert available_memory_bytes(tmp_path / "absent") is None
