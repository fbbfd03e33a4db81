"""Every command that moves bytes takes `--interface`, and refuses one that is not there with those that are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.processes.cli.commands import running, tensorhub


@pytest.mark.parametrize("command", ["publish", "pull", "seed", "bench"])
def test_an_interface_that_is_not_there(command: str, tmp_path: Path, hub: str, model: str) -> None:
    save_file({"a": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    where = ("--server", hub, "--interface", "nosuch0")
    arguments: dict[str, tuple[object, ...]] = {
        "publish": (tmp_path, "--model", model, "--version", 1, *where),
        "pull": ("--model", model, "--out", tmp_path / "out", *where),
        "seed": ("--model", model, *where),
        "bench": ("--transport", "tcp", "--megabytes", 1, "--versions", 2, "--tensors", 1, "--json", *where[2:]),
    }
    with running("publish", tmp_path, "--model", model, "--version", 0, "--server", hub, log=tmp_path / "log"):
        ended = tensorhub(command, *arguments[command])
    assert ended.code == 1
    said = " ".join((ended.out + ended.err).split())
    for part in ("no network interface 'nosuch0'", "lo (127.0.0.1"):
        assert part in said


def test_commands_say_where_they_run(tmp_path: Path, hub: str, model: str) -> None:
    save_file({"a": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    place = ("--zone", "east", "--host", "node-7", "--rail", "mlx5_3", "--interface", "lo")
    with running("publish", tmp_path, "--model", model, "--version", 0, "--server", hub, *place, log=tmp_path / "log"):
        status = tensorhub("status", model, "--json", "--server", hub)
    assert '"zone": "east"' in status.out
    assert '"host": "node-7"' in status.out
