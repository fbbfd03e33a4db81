"""A pull that is broken off, by its user or by its only source, ends in time and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorhub_core.client.oneshot import ask
from tensorhub_core.state.messages import GetStatus, StatusReply
from tests.processes.cli.commands import COMMAND, TIMEOUT_S, environment, running, tensorhub
from tests.unit.checkpoint.samples import save

BY_TCP = {"TENSORHUB_TRANSPORT": "tcp"}
"""Over TCP a stopped process no longer answers; within one machine its memory could still be read."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a hub that takes a stopped publisher for alive until the readers are at it."""
    log = tmp_path_factory.mktemp("hub") / "log"
    options = ("--lease-s", "12", "--heartbeat-s", "0.2", "--grace-s", "12")
    with running("serve", "--bind", "tcp://127.0.0.1:0", *options, log=log) as command:
        yield command.first_line.removeprefix("listening on ")


def wait_until_filling(hub: str, model: str) -> None:
    """Return when a worker of the model is filling."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        status = ask(hub, GetStatus(model))
        assert isinstance(status, StatusReply)
        if any(shard.state == "filling" for m in status.models for r in m.replicas for shard in r.shards):
            return
        time.sleep(0.05)
    raise AssertionError("nobody began to fill")


@pytest.fixture
def stopped_source(hub: str, model: str, tmp_path: Path) -> Iterator[None]:
    """Publish a version from a process that is then stopped."""
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", {"w": torch.zeros(64 << 20, dtype=torch.uint8)})
    arguments = ("--model", model, "--version", 1, "--server", hub)
    with running("publish", tmp_path / "in", *arguments, log=tmp_path / "log", **BY_TCP) as publisher:
        os.kill(publisher.process.pid, signal.SIGSTOP)
        yield


@pytest.mark.usefixtures("stopped_source")
def test_the_only_source_stops(hub: str, model: str, tmp_path: Path) -> None:
    started = time.monotonic()
    ended = tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub, "--timeout-s", 20, **BY_TCP)
    assert ended.error
    assert time.monotonic() - started < 40, ended.err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "log"]


@pytest.mark.usefixtures("stopped_source")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_user_ends_it(hub: str, model: str, tmp_path: Path, number: int) -> None:
    command = [*COMMAND, "pull", "--model", model, "--out", str(tmp_path / "out"), "--server", hub]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(**BY_TCP)) as pull:
        wait_until_filling(hub, model)
        pull.send_signal(number)
        _, err = pull.communicate(timeout=TIMEOUT_S)
    assert pull.returncode != 0
    assert b"Traceback" not in err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "log"]
