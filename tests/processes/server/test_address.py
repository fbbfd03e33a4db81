"""Addresses: taken, impossible, silent, stale."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tensorhub_core.client.oneshot import ask
from tensorhub_core.errors import AddressInUse, ConfigError, ServerUnreachable
from tensorhub_core.server.serving import serve
from tensorhub_core.state.messages import GetStatus, StatusReply
from tests.processes.server.raw import ServerProcess, free_port, server_process


@pytest.fixture(params=["tcp", "ipc"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"ipc://{tmp_path}/hub.sock"


def test_a_free_port_becomes_the_real_one_and_the_server_answers_there() -> None:
    with serve() as server:
        assert not server.address.endswith(":0")
        reply = ask(server.address, GetStatus(), timeout_s=10)
    assert isinstance(reply, StatusReply)
    assert reply.models == ()
    assert 0 <= reply.uptime_s < 60


def test_a_taken_address_is_refused_by_name_and_free_again_after_the_end(bind: str) -> None:
    with serve(bind) as first:
        with pytest.raises(AddressInUse, match=bind):
            serve(bind)
        assert isinstance(ask(first.address, GetStatus(), timeout_s=10), StatusReply), "the first one goes on"
    with serve(bind) as second:
        assert isinstance(ask(second.address, GetStatus(), timeout_s=10), StatusReply)


def test_a_port_that_another_program_uses_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        bind = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=bind):
            serve(bind)


def test_a_unix_socket_that_another_program_uses_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(AddressInUse, match=str(path)):
            serve(f"ipc://{path}")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_the_command_says_it_in_one_line_and_exits_with_1(tmp_path: Path) -> None:
    with server_process(tmp_path) as first:
        done = subprocess.run(
            [sys.executable, "-m", "tensorhub_core.cli.main", "serve", "--bind", first.address],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert first.address in done.stderr


def test_a_killed_server_leaves_no_address_behind(bind: str, tmp_path: Path) -> None:
    killed = ServerProcess("--bind", bind, errors=tmp_path / "err")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    killed.process.stdout.close()  # type: ignore[union-attr]
    with serve(bind) as server:
        assert isinstance(ask(server.address, GetStatus(), timeout_s=10), StatusReply)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_server_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    server = ServerProcess("--bind", "tcp://127.0.0.1:0", errors=tmp_path / "err")
    assert server.first_line.startswith("listening on tcp://127.0.0.1:")
    os.kill(server.process.pid, number)
    assert server.process.wait(10) == 0
    assert "Traceback" not in server.log
    with serve(server.address):
        pass
    server.process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:7077", "write tcp://"),
        ("tcp://", "write tcp://"),
        ("http://127.0.0.1:1", "write tcp://"),
        ("tcp://127.0.0.1", "not a valid address"),
        ("tcp://127.0.0.1:notaport", "not a valid address"),
        ("tcp://127.0.0.1:70000", "not a valid address"),
        ("tcp://203.0.113.7:7077", "no such address"),
        ("tcp://no-such-host.invalid:7077", "cannot be resolved"),
        ("ipc:///no/such/folder/hub.sock", "folder does not exist"),
        ("ipc:///tmp/" + "x" * 120, "too long"),
    ],
)
def test_impossible_addresses_are_refused_by_name(address: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(address)
    assert address in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "*", "lo"])
def test_host_names_numbers_and_interfaces_can_be_bound(host: str) -> None:
    with serve(f"tcp://{host}:0") as server:
        port = server.address.rpartition(":")[2]
        assert isinstance(ask(f"tcp://127.0.0.1:{port}", GetStatus(), timeout_s=10), StatusReply)


def test_nobody_there_is_said_by_the_deadline_with_the_address() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(ServerUnreachable, match=address):
        ask(address, GetStatus(), timeout_s=0.5)
    assert 0.4 < time.monotonic() - started < 5


def test_a_silent_listener_is_unreachable_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerUnreachable, match=address):
            ask(address, GetStatus(), timeout_s=0.5)


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1:notaport", "gopher://x:1"])
def test_asking_an_impossible_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(address, GetStatus(), timeout_s=0.5)
    assert address in str(caught.value)


def test_a_server_in_this_process_leaves_no_thread_and_no_open_file() -> None:
    with serve():
        pass
    files = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(20):
        with serve():
            pass
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files + 2


def test_closing_twice_and_in_a_forked_child_is_harmless() -> None:
    server = serve()
    child = os.fork()
    if child == 0:
        server.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert isinstance(ask(server.address, GetStatus(), timeout_s=10), StatusReply)
    server.close()
    server.close()
