"""The commands `serve` and `status` as users call them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from tensorhub_core.cli import main as main_module
from tensorhub_core.cli.main import tensorhub
from tensorhub_core.cli.status import duration, progress, render
from tensorhub_core.config import ServerConfig
from tensorhub_core.server.embedded import embedded_address, read_record
from tensorhub_core.state.messages import (
    Failure,
    Filling,
    JoinRound,
    ModelStatus,
    Ok,
    Promise,
    Register,
    ReplicaStatus,
    ShardStatus,
    StatusReply,
    VersionStatus,
)
from tests.processes.server.raw import RawClient, ServerProcess, alive, eventually, free_port, server_process

PLACE = {"zone": str, "host": str, "rail": str}
FILLS = {
    "version": int,
    "begun": bool,
    "done_bytes": int,
    "total_bytes": int,
    "bytes_per_s": float,
    "staged": bool,
    "late": bool,
}
SHAPE = {
    "server": {"address": str, "epoch": int, "uptime_s": float},
    "models": [
        {
            "model": str,
            "stream": (str, type(None)),
            "epoch": int,
            "latest": (int, type(None)),
            "versions": [{"version": int, "whole": bool, "retained": bool, "replicas": [str]}],
            "replicas": [
                {
                    "replica": str,
                    "zone": str,
                    "host": str,
                    "spot": bool,
                    "version": (int, type(None)),
                    "state": str,
                    "shards": [
                        {
                            "shard": int,
                            "version": (int, type(None)),
                            "state": str,
                            "done_bytes": int,
                            "total_bytes": int,
                            "source": (str, type(None)),
                            "bytes_per_s": float,
                            "place": PLACE,
                            "sources": [{"replica": str, "shard": int, "place": PLACE, "wan": bool}],
                            "fills": (FILLS, type(None)),
                        }
                    ],
                    "seeds": bool,
                    "waits_for": (str, type(None)),
                }
            ],
            "drain": {"count": int, "total_s": float, "max_s": float},
            "offload": {"made": int, "dropped": int, "bytes": int},
        }
    ],
}
STATES = {"idle", "filling", "published", "draining", "dirty", "offload", "suspected"}


def assert_shape(value: object, shape: object, where: str = "$") -> None:
    """Check that JSON has exactly the documented keys and types."""
    if isinstance(shape, tuple) and isinstance(shape[0], dict):
        shape = type(None) if value is None else shape[0]
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        assert set(value) == set(shape), where
        for key, part in shape.items():
            assert_shape(value[key], part, f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for item in value:
            assert_shape(item, shape[0], f"{where}[]")
    else:
        assert isinstance(value, shape), f"{where}: {value!r}"
        assert not isinstance(value, bool) or shape is bool, where


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensorhub_core.cli.main", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("server"), "--lease-s", "30") as running:
        yield running


@pytest.fixture(scope="module")
def busy(server: ServerProcess) -> Iterator[ServerProcess]:
    """A server with a publisher, a reader that fills from it, and an odd name."""
    with RawClient(server.address) as trainer, RawClient(server.address) as reader, RawClient(server.address) as odd:
        trainer.hello("trainer", stream="run-1", zone="east", host="node-1")
        assert not isinstance(trainer.publish(7, total_bytes=2_000_000), Failure)
        reader.hello("rollout-1", spot=True)
        layout, placement = reader.put(b"layout"), reader.put(b"placement of the reader")
        reader.ask(Register(layout, placement, 2_000_000, 1))
        promise = reader.ask(JoinRound(0))
        assert isinstance(promise, Promise), promise
        assert isinstance(reader.ask(Filling(promise.round)), Ok)
        odd.hello("evil\x1b[31m\nname [bold]", model="[red]odd[/red]")
        yield server


def test_json_has_exactly_the_documented_shape(busy: ServerProcess) -> None:
    done = run("status", "--json", "--server", busy.address)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert_shape(document, SHAPE)
    assert document["server"]["address"] == busy.address
    policy = next(model for model in document["models"] if model["model"] == "policy")
    assert (policy["stream"], policy["latest"]) == ("run-1", 7)
    assert policy["versions"] == [{"version": 7, "whole": True, "retained": True, "replicas": ["trainer"]}]
    replicas = {replica["replica"]: replica for replica in policy["replicas"]}
    assert set(replicas) == {"trainer", "rollout-1"}
    assert (replicas["trainer"]["zone"], replicas["trainer"]["host"]) == ("east", "node-1")
    assert replicas["trainer"]["state"] == "published"
    assert replicas["rollout-1"]["spot"]
    assert replicas["rollout-1"]["shards"][0]["source"] == "trainer"
    assert {shard["state"] for replica in replicas.values() for shard in replica["shards"]} <= STATES


def test_a_model_can_be_picked_and_the_server_come_from_the_environment(busy: ServerProcess) -> None:
    done = run("status", "policy", "--json", TENSORHUB_SERVER=busy.address)
    assert [model["model"] for model in json.loads(done.stdout)["models"]] == ["policy"]


def test_the_table_shows_who_holds_what_and_reads_from_whom(busy: ServerProcess) -> None:
    done = run("status", "--server", busy.address, COLUMNS="150")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    row = next(line for line in lines if "rollout-1" in line)
    assert "(spot)" in row
    assert "trainer" in row
    assert "filling" in row
    assert "0% of 2.0 MB" in row
    assert any("policy" in line and "latest 7" in line and "run-1" in line for line in lines)
    assert any("trainer" in line and "published" in line and "2.0 MB" in line for line in lines)


def test_names_cannot_steer_the_terminal_or_the_table(busy: ServerProcess) -> None:
    done = run("status", "--server", busy.address, COLUMNS="150")
    assert "\x1b" not in done.stdout
    assert "evil\\x1b[31m\\nname [bold]" in done.stdout
    assert "[red]odd[/red]" in done.stdout


def test_an_unknown_model_is_an_error_of_one_line(busy: ServerProcess) -> None:
    done = run("status", "no-such-model", "--server", busy.address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["status", "--no-such-option"], ["no-such-command"], ["serve", "--lease-s", "five"], ["status", "a", "b"]],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["serve", "--lease-s", "-1"], {}, "lease_s"),
        (["serve", "--lease-s", "1", "--heartbeat-s", "1"], {}, "heartbeat_s"),
        (["serve", "--retain", "-1"], {}, "retain"),
        (["serve", "--retain-model", "critic"], {}, "retain_models"),
        (["serve"], {"TENSORHUB_LEASES_S": "3"}, "lease_s"),
        (["status"], {"TENSORHUB_CONFIG": "/no/such/file.toml"}, "/no/such/file.toml"),
    ],
)
def test_wrong_settings_exit_with_1_and_name_the_setting(
    arguments: list[str], environment: dict[str, str], named: str
) -> None:
    done = run(*arguments, **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_nobody_there_exits_with_1_and_names_the_address() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    done = run("status", "--server", address, TENSORHUB_CONNECT_TIMEOUT_S="0.5")
    assert done.returncode == 1
    assert address in done.stderr


def test_looking_starts_no_hub_and_finds_one_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    none = run("status", TENSORHUB_RUNTIME_DIR=str(folder))
    assert none.returncode == 1
    assert "tensorhub serve" in none.stderr
    assert read_record(folder) is None
    address = embedded_address(30, ServerConfig(runtime_dir=str(folder)))
    record = read_record(folder)
    assert record is not None
    try:
        some = run("status", "--json", TENSORHUB_RUNTIME_DIR=str(folder))
        assert json.loads(some.stdout)["server"]["address"] == address
    finally:
        os.kill(record.pid, signal.SIGTERM)
        eventually(lambda: not alive(record.pid), "the hub ends")


def test_watching_goes_on_until_it_is_interrupted(busy: ServerProcess) -> None:
    command = [sys.executable, "-m", "tensorhub_core.cli.main", "status", "--watch", "--json", "--server", busy.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        documents = [json.loads(watch.stdout.readline()) for _ in range(2)]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(10) == 0
    for document in documents:
        assert_shape(document, SHAPE)
    assert documents[1]["server"]["uptime_s"] > documents[0]["server"]["uptime_s"]


def test_watching_outlives_the_server(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    first = ServerProcess("--bind", address, errors=tmp_path / "first")
    command = [sys.executable, "-m", "tensorhub_core.cli.main", "status", "--watch", "--server", address]
    environment = {**os.environ, "TENSORHUB_CONNECT_TIMEOUT_S": "2", "COLUMNS": "150"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as watch:
        assert watch.stdout is not None
        assert address in watch.stdout.readline()
        first.end()
        while "no answer" not in (line := watch.stdout.readline()):
            assert line, "it ended"
        second = ServerProcess("--bind", address, errors=tmp_path / "second")
        while "epoch" not in (line := watch.stdout.readline()):
            assert line, "it ended"
        watch.send_signal(signal.SIGINT)
        assert watch.wait(10) == 0
        second.end()


def test_commands_that_are_not_installed_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main_module.COMMANDS, "nowhere", "Not there.")
    listed = CliRunner().invoke(tensorhub, ["--help"])
    assert listed.exit_code == 0
    assert "serve" in listed.output
    assert "nowhere" not in listed.output
    assert CliRunner().invoke(tensorhub, ["nowhere"]).exit_code == 2


def test_help_and_version_import_no_command() -> None:
    code = (
        "import sys; from tensorhub_core.cli.main import tensorhub\n"
        "try: tensorhub(['--help'])\n"
        "finally:\n"
        "    heavy = {'torch', 'zmq', 'numpy', 'rich', 'tensorhub_core.client'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Run the reference server." in done.stdout
    assert run("--version").stdout.startswith("tensorhub ")


def test_every_state_and_progress_is_drawn() -> None:
    shards = tuple(
        ShardStatus(index, index, state, 25, 100, "source", 1e6) for index, state in enumerate(sorted(STATES))
    )
    replica = ReplicaStatus("r", "z", "h", False, None, "filling", shards)
    model = ModelStatus("m", None, 1, None, (VersionStatus(3, False, True, ("a", "b")),), (replica,))
    console = Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render("tcp://x:1", StatusReply(5, 4000.0, (model,))))
    text = console.export_text()
    assert all(state in text for state in STATES)
    assert "up 1 h 6 m" in text
    assert "nothing whole yet" in text
    assert "25% of 100 bytes" in text
    assert "1.0 MB/s" in text


@pytest.mark.parametrize(
    ("done", "total", "filled", "share"),
    [(0, 100, 0, "0%"), (50, 100, 5, "50%"), (99, 100, 9, "99%"), (100, 100, 10, "100%"), (300, 100, 10, "100%")],
)
def test_the_bar_never_says_more_than_there_is(done: int, total: int, filled: int, share: str) -> None:
    text = progress(ShardStatus(0, 1, "filling", done, total, None, 0.0))
    assert text.count("█") == filled
    assert text.count("█") + text.count("░") == 10
    assert f" {share} of" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 m 0 s"), (3599, "59 m 59 s"), (3600, "1 h 0 m"), (90061, "1 d 1 h")],
)
def test_durations_are_said_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
