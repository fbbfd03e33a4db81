"""CURVE: who has the keys is served and speaks encrypted, everybody else is told why not."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner, Result

from tensorhub_core import Worker, connect, serve
from tensorhub_core.cli.main import tensorhub
from tensorhub_core.client.observer import observe
from tensorhub_core.client.oneshot import ask
from tensorhub_core.config import ClientConfig, ServerConfig
from tensorhub_core.errors import ConfigError, ServerUnreachable
from tensorhub_core.server.gate import LOOK_EVERY_S
from tensorhub_core.server.serving import Server
from tensorhub_core.state.messages import GetStatus, StatusReply
from tensorhub_core.wire.curve import client_keys, server_keys
from tests.processes.client.samples import blank, make, same
from tests.processes.server.raw import RawClient, eventually, server_process, tcp
from tests.processes.server.standby import candidates

pytestmark = pytest.mark.timeout(90)
FAST = {"lease_s": 1.0, "heartbeat_s": 0.1}


def keygen(folder: Path, name: str = "client") -> Result:
    return CliRunner().invoke(tensorhub, ["keygen", str(folder), "--name", name])


def server_side(folder: Path) -> dict[str, str]:
    return {"curve_secret": str(folder / "server.key_secret"), "curve_clients": str(folder / "clients")}


def client_side(folder: Path, name: str = "client") -> dict[str, str]:
    return {"curve_server": str(folder / "server.key"), "curve_client": str(folder / f"{name}.key_secret")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    assert keygen(folder).exit_code == 0
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serve(settings={**server_side(folder), **FAST}) as running:
        yield running


def quickly(server: Server | str, settings: dict[str, object], timeout_s: float = 1.5) -> Worker:
    address = server if isinstance(server, str) else server.address
    return connect(address, model="m", settings={"connect_timeout_s": timeout_s, **settings})


def test_workers_observers_and_commands_with_keys_are_served(server: Server, folder: Path) -> None:
    keys = client_side(folder)
    with (
        connect(server.address, model="m", replica="trainer", settings=keys) as trainer,
        connect(server.address, model="m", replica="reader", settings=keys) as reader,
    ):
        trainer.register(sample := make("plain", 1))
        trainer.publish(1)
        tensors = blank(sample)
        reader.register(tensors)
        with observe(server.address, model="m", settings=keys) as observer:
            assert observer.wait(timeout_s=10) == 1
        assert reader.replicate(timeout_s=20) == 1
        assert same(tensors, sample)
        environment = {f"TENSORHUB_{name.upper()}": value for name, value in keys.items()}
        shown = CliRunner(env=environment).invoke(tensorhub, ["status", "--json", "--server", server.address])
        assert shown.exit_code == 0, shown.output
        assert '"trainer"' in shown.output
        reader.close()
        trainer.close()


def test_a_client_whose_key_is_not_in_the_folder_is_told_so_and_the_log_names_it(
    server: Server, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert keygen(folder, "stranger").exit_code == 0
    (folder / "clients" / "stranger.key").unlink()
    keys = client_keys(ClientConfig(**client_side(folder, "stranger")))
    assert keys is not None
    with caplog.at_level(logging.WARNING, "tensorhub"), pytest.raises(ServerUnreachable) as refused:
        quickly(server, client_side(folder, "stranger"))
    for told in (server.address, "refused this client's key", keys.public.decode(), "curve_clients"):
        assert told in str(refused.value)
    assert f"refused a client at 127.0.0.1: its key {keys.public.decode()}" in caplog.text
    assert keys.secret.decode() not in caplog.text
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(ServerUnreachable, match="refused this client's key"):
        ask(server.address, GetStatus(), timeout_s=1.0, keys=keys)


def test_a_client_without_curve_is_told_to_use_it(server: Server) -> None:
    with pytest.raises(ServerUnreachable, match="CURVE") as refused:
        quickly(server, {})
    assert "curve_server" in str(refused.value) or "speaks CURVE" in str(refused.value)
    with pytest.raises(ServerUnreachable, match="CURVE"):
        ask(server.address, GetStatus(), timeout_s=1.0)


def test_a_client_with_curve_at_a_server_without_is_told_so(folder: Path) -> None:
    with serve() as plain, pytest.raises(ServerUnreachable, match="speaks without") as refused:
        quickly(plain, client_side(folder))
    assert plain.address in str(refused.value)


def test_a_client_that_takes_another_servers_key_for_this_ones_is_told_so(server: Server, folder: Path) -> None:
    wrong = {**client_side(folder), "curve_server": zmq.curve_keypair()[0].decode()}
    with pytest.raises(ServerUnreachable, match="curve_server is not its key"):
        quickly(server, wrong)


def test_the_servers_key_may_be_given_as_text(server: Server, folder: Path) -> None:
    keys = server_keys(ServerConfig(**server_side(folder)))
    assert keys is not None
    with quickly(server, {**client_side(folder), "curve_server": keys.public.decode()}, 10):
        pass


def test_a_key_that_is_added_or_taken_away_counts_without_a_restart(server: Server, folder: Path) -> None:
    keygen(folder, "late")
    public = folder / "clients" / "late.key"
    aside = folder / "late.key"
    public.rename(aside)
    with pytest.raises(ServerUnreachable, match="refused"):
        quickly(server, client_side(folder, "late"))
    outcome: list[object] = []

    def wait_for_the_key() -> None:
        with quickly(server, client_side(folder, "late"), 20) as worker:
            outcome.append(worker.replica)

    thread = threading.Thread(target=wait_for_the_key)
    thread.start()
    time.sleep(0.3)
    assert not outcome
    aside.rename(public)
    thread.join(20)
    assert outcome, "a client that is waiting is let in as soon as its key is there"
    public.unlink()
    time.sleep(2 * LOOK_EVERY_S)
    with pytest.raises(ServerUnreachable, match="refused"):
        quickly(server, client_side(folder, "late"))
    with quickly(server, client_side(folder), 10):
        pass


def test_files_that_are_no_certificates_let_nobody_in_and_stop_nobody_else(server: Server, folder: Path) -> None:
    clients = folder / "clients"
    (clients / "empty.key").write_bytes(b"")
    (clients / "junk.key").write_bytes(secrets.token_bytes(2000))
    (clients / "short.key").write_text('curve\n    public-key = "abc"\n')
    (clients / "folder.key").mkdir()
    os.mkfifo(clients / "pipe.key")
    (clients / "gone.key").symlink_to(clients / "nowhere")
    (clients / "note.txt").write_text("not a key")
    time.sleep(2 * LOOK_EVERY_S)
    with quickly(server, client_side(folder), 10):
        pass


def test_a_worker_that_was_let_in_comes_back_after_a_restart(folder: Path) -> None:
    settings = {**server_side(folder), **FAST}
    first = serve(settings=settings)
    with connect(first.address, model="m", settings=client_side(folder)) as worker:
        first.close()
        with serve(first.address, settings=settings):
            eventually(lambda: worker.counters.reconnects > 0, "it said hello again", 20)
            worker.close()


def test_what_passes_over_the_wire_cannot_be_read(server: Server, folder: Path) -> None:
    """A proxy between the two sees neither names nor plain messages; without CURVE it does."""
    with serve() as plain:
        for target, settings, visible in ((plain, {}, True), (server, client_side(folder), False)):
            heard, address = _tap(target.address)
            with connect(address, model="a-secret-project", settings=settings):
                pass
            assert (b"a-secret-project" in bytes(heard)) is visible


def _tap(address: str) -> tuple[bytearray, str]:
    """Pass one connection on to a server; return what passes, and where to connect."""
    heard = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                heard.extend(data)
                target.sendall(data)
        except OSError:
            pass

    def run() -> None:
        with listener:
            near, _ = listener.accept()
        with near, tcp(address) as far:
            far.settimeout(None)
            back = threading.Thread(target=copy, args=(far, near), daemon=True)
            back.start()
            copy(near, far)

    threading.Thread(target=run, daemon=True).start()
    return heard, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_nobody_gets_to_the_machine_without_the_keys(server: Server) -> None:
    before = server.counters.received
    with RawClient(server.address) as client:
        client.socket.send_multipart([b"x", b"y"])
        assert not client.socket.poll(300)
    with tcp(server.address) as plain:
        greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + b"\x00" * 47
        plain.sendall(greeting + secrets.token_bytes(3000))
    assert server.counters.received == before


def test_a_unix_socket_is_guarded_by_its_permissions_and_speaks_without(folder: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'hub.sock'}"
    with serve(address, settings=server_side(folder)):
        for settings in ({}, client_side(folder)):
            with quickly(address, settings, 10):
                pass


def test_without_a_folder_whoever_knows_the_server_is_served(folder: Path, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    with serve(settings={"curve_secret": str(folder / "server.key_secret")}) as open_server:
        stranger = {**client_side(tmp_path / "other"), "curve_server": str(folder / "server.key")}
        with quickly(open_server, stranger, 10):
            pass


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://127.0.0.1:0"])
def test_who_listens_to_everybody_is_warned_once(bind: str, caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    with caplog.at_level(logging.WARNING, "tensorhub"):
        with serve(bind):
            pass
        lines = [line for line in caplog.messages if "can be reached from other machines" in line]
        assert len(lines) == (0 if "127" in bind else 1)
        caplog.clear()
        with serve(bind, settings=server_side(folder)):
            pass
        assert not [line for line in caplog.messages if "can be reached" in line]


def test_keygen_says_what_to_set_and_that_works(tmp_path: Path) -> None:
    made = keygen(tmp_path / "keys", "rollouts")
    assert made.exit_code == 0, made.output
    says = dict(line.split("export ")[1].split("=", 1) for line in made.output.splitlines() if "export" in line)
    assert sorted(says) == [f"TENSORHUB_CURVE_{part}" for part in ("CLIENT", "CLIENTS", "SECRET", "SERVER")]
    environment = {**os.environ, **says}
    with server_process(tmp_path, "--curve-secret", says["TENSORHUB_CURVE_SECRET"]) as server:
        command = [sys.executable, "-m", "tensorhub_core.cli.main", "status", "--server", server.address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr


def test_secrets_are_readable_by_their_user_only_and_nothing_is_overwritten(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert keygen(keys, "a").exit_code == 0
    before = {path: path.read_bytes() for path in keys.rglob("*.key*")}
    assert len(before) == 4
    for path in before:
        if path.name.endswith("_secret"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        else:
            assert b"secret-key" not in before[path]
    again = keygen(keys, "a")
    assert again.exit_code == 1
    assert "a.key" in again.output
    assert keygen(keys, "b").exit_code == 0
    assert {path: path.read_bytes() for path in before} == before
    (keys / "server.key").unlink()
    assert keygen(keys, "c").exit_code == 1, "half of the server's pair is there"
    assert not [path for path in keys.iterdir() if path.name.startswith(".")], "nothing is left behind"


@pytest.mark.parametrize("name", ["server", "", "../x", "a/b", "-x", "x" * 65, "ü"])
def test_names_that_are_no_file_names_are_refused(name: str, tmp_path: Path) -> None:
    assert keygen(tmp_path / "keys", name).exit_code != 0
    assert not (tmp_path / "keys").exists()


def test_impossible_keys_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.key_secret"
    other = zmq.curve_keypair()[0].decode()
    lines = (folder / "client.key_secret").read_text().splitlines()
    damaged.write_text("\n".join(f'    public-key = "{other}"' if "public-key" in line else line for line in lines))
    (junk := tmp_path / "junk").write_bytes(secrets.token_bytes(100))
    clients = [
        ({"curve_client": str(folder / "client.key_secret")}, "curve_server"),
        ({"curve_server": str(folder / "server.key")}, "curve_client"),
        ({**client_side(folder), "curve_server": str(tmp_path / "no-file")}, "no-file"),
        ({**client_side(folder), "curve_server": str(junk)}, "not a ZeroMQ certificate"),
        ({**client_side(folder), "curve_client": str(folder / "server.key")}, "no secret key"),
        ({**client_side(folder), "curve_client": str(damaged)}, "damaged"),
        ({**client_side(folder), "curve_client": str(tmp_path)}, "cannot be read"),
    ]
    for settings, why in clients:
        with pytest.raises(ConfigError, match=why):
            connect("tcp://127.0.0.1:9", model="m", settings=settings)
    shutil.rmtree(folder / "clients")
    for settings, why in (
        ({"curve_clients": str(folder)}, "curve_secret"),
        (server_side(folder), "not a folder"),
        ({"curve_secret": str(folder / "server.key")}, "no secret key"),
    ):
        with pytest.raises(ConfigError, match=why):
            serve(settings=settings)


def test_status_over_curve_is_the_same_server(server: Server, folder: Path) -> None:
    reply = ask(server.address, GetStatus(), keys=client_keys(ClientConfig(**client_side(folder))))
    assert isinstance(reply, StatusReply)


def test_a_standby_with_the_same_keys_takes_over_and_is_found(folder: Path, tmp_path: Path) -> None:
    options = [part for name, value in server_side(folder).items() for part in (f"--{name.replace('_', '-')}", value)]
    with candidates(tmp_path) as made:
        active = made.start(*options)
        active.wait_until_it_serves()
        waiting = made.start(*options)
        waiting.wait_until_it_waits()
        addresses = [active.address, waiting.address]
        with connect(addresses, model="m", settings=client_side(folder)) as worker:
            active.signal(signal.SIGKILL)
            eventually(lambda: worker.counters.reconnects > 0, "it said hello to the standby", 30)
            assert worker.versions() == []
        keygen(folder, "stranger")
        (folder / "clients" / "stranger.key").unlink()
        with pytest.raises(ServerUnreachable) as refused:
            connect(addresses, model="m", settings={**client_side(folder, "stranger"), "connect_timeout_s": 2.5})
        assert f"{active.address}: the connection was refused" in str(refused.value)
        assert f"{waiting.address}: it refused this client's key" in str(refused.value)
