"""All processes of a user share one hub: started on demand, by whoever comes first, replaced after a crash."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorhub_core.client.oneshot import ask
from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import ConfigError, ServerUnreachable
from tensorhub_core.server.embedded import HubRecord, embedded_address, read_record, running_address
from tensorhub_core.server.files import free_lock, take_lock
from tensorhub_core.state.messages import GetStatus, Heartbeat, Leave, StatusReply, Welcome
from tests.processes.server.raw import RawClient, alive, eventually, kill

START_S = 30.0


@dataclass
class Home:
    """A runtime folder with what may run in it."""

    folder: Path
    server: ServerConfig

    def record(self) -> HubRecord:
        record = read_record(self.folder)
        assert record is not None, self.log
        return record

    def address(self) -> str:
        return embedded_address(START_S, self.server)

    @property
    def log(self) -> str:
        path = self.folder / "hub.log"
        return path.read_text() if path.exists() else "no log"

    def hubs(self) -> list[int]:
        """Return the hub processes of this folder that live."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and b"tensorhub_core.server" in (entry / "cmdline").read_bytes():
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    if f"TENSORHUB_RUNTIME_DIR={self.folder}".encode() in environment and alive(int(entry.name)):
                        found.append(int(entry.name))
        return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    folder = tmp_path / "runtime"
    home = Home(folder, ServerConfig(runtime_dir=str(folder), idle_s=60.0, lease_s=0.6, heartbeat_s=0.1))
    yield home
    hubs = home.hubs()
    for pid in hubs:
        kill(pid, signal.SIGTERM)
    eventually(lambda: not any(alive(pid) for pid in hubs), "the hubs end")


def ask_for_address(server: ServerConfig, gate: object, answers: object) -> None:
    gate.wait()  # type: ignore[attr-defined]
    address = embedded_address(START_S, server)
    reply = ask(address, GetStatus(), timeout_s=10)
    answers.put((address, reply.server_epoch))  # type: ignore[attr-defined, union-attr]


def all_at_once(server: ServerConfig, count: int) -> list[tuple[str, int]]:
    """Let `count` processes ask for the address at the same moment."""
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(count), context.Queue()
    processes = [context.Process(target=ask_for_address, args=(server, gate, answers)) for _ in range(count)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=START_S + 15) for _ in processes]
    for process in processes:
        process.join(10)
        assert process.exitcode == 0
    return found


def test_ten_processes_at_once_get_one_hub_and_after_its_crash_one_other(home: Home) -> None:
    first = all_at_once(home.server, 10)
    assert len(set(first)) == 1, home.log
    assert home.hubs() == [home.record().pid]
    kill(home.record().pid, signal.SIGKILL)
    second = all_at_once(home.server, 10)  # the address file of the dead hub is still there
    assert len(set(second)) == 1, home.log
    assert home.hubs() == [home.record().pid]
    assert second[0][1] > first[0][1], "a higher epoch"
    assert second[0][0] != first[0][0], "no address is used twice"


def test_hubs_that_start_without_the_start_lock_still_settle_on_one(home: Home) -> None:
    environment = {**os.environ, "TENSORHUB_RUNTIME_DIR": str(home.folder)}
    command = [sys.executable, "-m", "tensorhub_core.server", "--detach"]
    starts = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(4)]
    outcomes = [(start.wait(START_S), start.stderr.read()) for start in starts]  # type: ignore[union-attr]
    for start in starts:
        start.stderr.close()  # type: ignore[union-attr]
    assert outcomes == [(0, b"")] * 4
    eventually(lambda: home.hubs() == [home.record().pid], "one hub is left")
    assert isinstance(ask(home.address(), GetStatus(), timeout_s=10), StatusReply)


def test_the_hub_is_a_process_of_its_own_that_outlives_its_starter(home: Home) -> None:
    code = f"from tests.processes.server.test_embedded import *; print(embedded_address({START_S}, {home.server!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    address = done.stdout.strip()
    assert address == home.address()
    pid = home.record().pid
    assert os.getsid(pid) == os.getpgid(pid) != os.getsid(0), "not in the starter's session"
    assert pid not in {child.pid for child in multiprocessing.active_children()}
    assert isinstance(ask(address, GetStatus(), timeout_s=10), StatusReply)


def test_its_files_are_the_users_alone(home: Home) -> None:
    home.address()
    assert home.folder.stat().st_mode & 0o777 == 0o700
    for name in ("address", "epoch", "hub.log", "lock", "start.lock"):
        assert (home.folder / name).stat().st_mode & 0o077 == 0, name


def test_it_ends_idle_s_after_its_last_worker_and_cleans_up(home: Home) -> None:
    home.server = ServerConfig(runtime_dir=str(home.folder), idle_s=0.2, lease_s=0.6, heartbeat_s=0.1)
    address = home.address()
    pid = home.record().pid
    with RawClient(address) as worker:
        assert isinstance(worker.hello(), Welcome)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            worker.ask(Heartbeat())
            time.sleep(0.1)
        assert alive(pid), "it stays with a worker"
    eventually(lambda: not alive(pid), "it ends without")
    assert sorted(entry.name for entry in home.folder.iterdir()) == ["epoch", "hub.log", "lock", "start.lock"]
    assert running_address(home.server) is None
    assert home.address() != address


def test_an_observer_does_not_keep_it(home: Home) -> None:
    home.server = ServerConfig(runtime_dir=str(home.folder), idle_s=0.1, lease_s=0.6, heartbeat_s=0.1)
    address, pid = home.address(), home.record().pid
    with RawClient(address) as worker, RawClient(address) as observer:
        worker.hello()
        observer.hello(observer=True)
        worker.close()
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            observer.post(GetStatus())
            time.sleep(0.05)
        assert not alive(pid)


def test_workers_that_come_and_go_while_hubs_end_always_find_one(home: Home) -> None:
    home.server = ServerConfig(runtime_dir=str(home.folder), idle_s=0.0, lease_s=0.6, heartbeat_s=0.1)
    pauses = [0.0, 0.3, 0.55, 0.75, 0.8, 0.85, 1.2]  # around the moments in which an idle hub withdraws and ends
    pids = set()
    for pause in pauses:
        with RawClient(home.address()) as worker:
            assert isinstance(worker.hello(), Welcome), home.log
            pids.add(home.record().pid)
            worker.ask(Leave())
        time.sleep(pause)
    assert len(pids) > 1, "some of them did end"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"address":"ipc:///nowhere","pid":1,"epoch":1}'])
def test_a_wrong_address_file_does_no_harm(home: Home, content: bytes) -> None:
    home.folder.mkdir(mode=0o700)
    (home.folder / "address").write_bytes(content)
    assert running_address(home.server) is None
    assert isinstance(ask(home.address(), GetStatus(), timeout_s=10), StatusReply)


def test_a_removed_folder_is_made_again_while_the_old_hub_serves_its_workers(home: Home) -> None:
    first = home.address()
    old = home.record().pid
    with RawClient(first) as worker:
        worker.hello()
        for entry in home.folder.iterdir():
            entry.unlink()
        assert home.address() != first
        assert home.record().pid != old
        assert isinstance(worker.hello("another"), Welcome), "who was there is served on"
    eventually(lambda: not alive(old), "the old hub ends with its last worker")
    assert read_record(home.folder) is not None, "and leaves the new one's address alone"


def test_settings_of_the_caller_reach_the_hub_it_starts(home: Home) -> None:
    with RawClient(home.address()) as worker:
        welcome = worker.hello()
        assert isinstance(welcome, Welcome)
        assert (welcome.lease_s, welcome.heartbeat_s) == (0.6, 0.1)


def test_a_deep_folder_works_too(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / "runtime"
    home = Home(folder, ServerConfig(runtime_dir=str(folder)))
    try:
        address = home.address()
        assert isinstance(ask(address, GetStatus(), timeout_s=10), StatusReply)
    finally:
        pid = home.record().pid
        kill(pid, signal.SIGTERM)
        eventually(lambda: not alive(pid), "it ends")
    assert not Path(address.removeprefix("ipc://")).parent.exists(), "its socket's folder is gone"


def test_a_hub_that_cannot_start_is_said_with_the_reason(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ServerUnreachable, match="/no/such/python"):
        embedded_address(5.0, home.server)


def test_a_lock_that_somebody_holds_without_a_hub_is_said_by_the_deadline(home: Home) -> None:
    home.folder.mkdir(mode=0o700)
    lock = take_lock(home.folder / "lock")
    assert lock is not None
    try:
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match="lock"):
            embedded_address(2.0, home.server)
        assert time.monotonic() - started < 15
    finally:
        free_lock(lock)


def test_a_folder_of_others_is_refused(home: Home) -> None:
    home.folder.mkdir()
    home.folder.chmod(0o777)
    with pytest.raises(ConfigError, match=str(home.folder)):
        home.address()
    assert home.hubs() == []


def test_in_the_foreground_it_says_where_it_listens(home: Home) -> None:
    environment = {**os.environ, "TENSORHUB_RUNTIME_DIR": str(home.folder)}
    command = [sys.executable, "-m", "tensorhub_core.server"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as hub:
        line = hub.stdout.readline()  # type: ignore[union-attr]
        assert line == f"listening on {home.address()}\n"
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert (second.returncode, second.stdout) == (0, line), "a second one names the first and ends"
        hub.send_signal(signal.SIGINT)
        assert hub.wait(10) == 0
    assert running_address(home.server) is None


@pytest.mark.parametrize("content", [b"", b"x", b"-5", b"9" * 400, b"1" * 5000])
def test_a_damaged_count_of_lives_does_no_harm(home: Home, content: bytes) -> None:
    home.folder.mkdir(mode=0o700)
    (home.folder / "epoch").write_bytes(content)
    reply = ask(home.address(), GetStatus(), timeout_s=10)
    assert isinstance(reply, StatusReply)
    assert reply.server_epoch > 1_700_000_000_000, "of the wall clock"


def test_a_starter_that_does_not_get_it_started_is_named(home: Home) -> None:
    """It was stopped, say, in the middle of the start."""
    home.folder.mkdir(mode=0o700)
    lock = take_lock(home.folder / "start.lock")
    assert lock is not None
    try:
        with pytest.raises(ServerUnreachable, match=r"another process, which holds .*start\.lock"):
            embedded_address(0.3, home.server)
    finally:
        free_lock(lock)


def test_it_starts_from_a_folder_that_is_gone(home: Home, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.rmdir({str(gone)!r}); from tensorhub_core.server.embedded import *; "
    code += f"print(embedded_address({START_S}, ServerConfig(runtime_dir={str(home.folder)!r})))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["relative", *filter(os.path.isabs, sys.path)])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=gone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == home.record().address
