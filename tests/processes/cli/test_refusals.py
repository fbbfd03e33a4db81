"""What users get wrong ends in exit code 1 and one clear line (2 for wrong usage), and nothing half done."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import torch

from tests.processes.cli.commands import HUB_OPTIONS, running, tensorhub
from tests.unit.checkpoint.samples import save

HASTE = {"TENSORHUB_CONNECT_TIMEOUT_S": "1"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a small checkpoint."""
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", {"w": torch.ones(10)})
    return tmp_path / "in"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_at_the_address(checkpoint: Path, tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    started = time.monotonic()
    for command in (
        ("publish", checkpoint, "--version", 1, "--model", "m"),
        ("pull", "--out", tmp_path / "out", "--model", "m"),
    ):
        assert address in tensorhub(*command, "--server", address, **HASTE).error
    assert time.monotonic() - started < 30
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "http://127.0.0.1:1"])
def test_no_address_at_all(checkpoint: Path, address: str) -> None:
    command = ("publish", checkpoint, "--version", 1, "--model", "m")
    assert address in tensorhub(*command, "--server", address, **HASTE).error


def test_a_port_in_use(hub: str) -> None:
    assert hub in tensorhub("serve", "--bind", hub).error


@pytest.mark.parametrize(
    "content", [None, b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x05\0\0\0\0\0\0\0{}"]
)
def test_no_checkpoint(hub: str, tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "in"
    if content is not None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
    ended = tensorhub("publish", folder, "--model", "m", "--version", 1, "--server", hub)
    assert str(folder) in ended.error
    assert ended.out == ""


def test_a_folder_in_use_is_not_written(hub: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("1")
    ended = tensorhub("pull", "--model", "m", "--out", tmp_path / "out", "--server", hub)
    assert "not empty" in ended.error
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_made(hub: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert (
        "not a directory"
        in tensorhub("pull", "--model", "m", "--out", tmp_path / "file" / "out", "--server", hub).error
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("publish",),
        ("publish", "folder", "--model", "m"),
        ("publish", "folder", "--model", "m", "--version", "-1"),
        ("publish", "folder", "--model", "m", "--version", "one"),
        ("pull", "--model", "m"),
        ("pull", "--out", "folder"),
        ("pull", "--model", "m", "--out", "folder", "--version", "newest"),
        ("pull", "--model", "m", "--out", "folder", "--timeout-s", "0"),
        ("doctor", "--jsno"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    ended = tensorhub(*arguments)
    assert ended.code == 2
    assert "Usage: " in ended.err


def test_a_setting_that_does_not_exist(checkpoint: Path) -> None:
    command = ("publish", checkpoint, "--version", 1, "--model", "m")
    assert "TENSORHUB_SERVR" in tensorhub(*command, TENSORHUB_SERVR="tcp://127.0.0.1:1").error


def test_a_publisher_ends_in_time_when_the_hub_is_gone(checkpoint: Path, tmp_path: Path) -> None:
    with running("serve", "--bind", "tcp://127.0.0.1:0", *HUB_OPTIONS, log=tmp_path / "hub-log") as server:
        address = server.first_line.removeprefix("listening on ")
        arguments = ("--model", "m", "--version", 1, "--drain-s", "2", "--server", address)
        with running("publish", checkpoint, *arguments, log=tmp_path / "log", **HASTE) as publisher:
            server.kill()
            started = time.monotonic()
            ended = publisher.end()
            assert time.monotonic() - started < 20
    assert address in ended.error
