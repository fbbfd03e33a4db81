"""A server that keeps a journal: what it lived through can be replayed, in another process, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tensorhub_core import connect, serve
from tensorhub_core.errors import ConfigError
from tests.processes.client.samples import blank, make
from tests.processes.server.raw import RawClient, ServerProcess, eventually, server_process

pytestmark = pytest.mark.timeout(90)
FAST = ("--lease-s", "1", "--heartbeat-s", "0.1")


def replayed(path: Path, *options: str, seed: str = "0") -> dict[str, object]:
    """Replay in a process of its own, with another order of sets."""
    command = [sys.executable, "-m", "tensorhub_core.cli.main", "replay", "--json", *options, str(path)]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def live(address: str) -> None:
    """Publish, read, update, and withdraw with two replicas."""
    settings = {"close_timeout_s": 2}
    with (
        connect(address, model="m", replica="trainer", settings=settings) as trainer,
        connect(address, model="m", replica="reader", settings=settings) as reader,
    ):
        trainer.register(sample := make("plain", 1))
        reader.register(blank(sample))
        for version in (1, 2, 3):
            trainer.publish(version)
            assert reader.update(timeout_s=30) == version
            trainer.unpublish(30)


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_the_life_of_a_server_is_replayed(tmp_path: Path, end: str) -> None:
    path = tmp_path / "journal"
    server = ServerProcess("--bind", "tcp://127.0.0.1:0", *FAST, "--journal", str(path), errors=tmp_path / "err")
    live(server.address)

    if end == "kill":
        eventually(lambda: path.stat().st_size > 1000, "it is written while the server runs", 20)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    else:
        assert server.end() == 0
    for seed in ("1", "2"):
        document = replayed(path, seed=seed)
        assert document["sound"] is True
        assert document["lives"] == 1
        assert isinstance(document["events"], int)
        assert document["events"] > 20
    assert replayed(path, "--until", "5")["events"] == 5
    assert server.process.stdout is not None
    server.process.stdout.close()


def test_a_second_life_is_added_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for _ in range(2):
        with serve(settings={"journal": str(path)}) as server, RawClient(server.address) as client:
            client.hello()
    document = replayed(path)
    assert (document["lives"], document["sound"]) == (2, True)


def test_nonsense_that_the_server_drops_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with server_process(tmp_path, "--journal", str(path)) as server, RawClient(server.address) as client:
        client.socket.send_multipart([b"junk", b"junk"])
        client.hello()
    assert replayed(path)["sound"] is True


def test_a_journal_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "journal"):
        with pytest.raises(ConfigError, match="the journal"):
            serve(settings={"journal": str(path)})
    with serve() as server:
        assert server.address
