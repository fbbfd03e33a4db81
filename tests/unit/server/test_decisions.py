"""What the server decides without a socket: when a hub ends, which folder is safe, what is logged."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest

from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import ConfigError
from tensorhub_core.ids import ModelName
from tensorhub_core.server.counters import RateLimitedLog
from tensorhub_core.server.embedded import read_record, runtime_folder
from tensorhub_core.server.files import accepts, free_lock, same_file, take_lock, write_atomically
from tensorhub_core.server.hub import FIRST_WORKER_S, LINGER_S, Idle, IdlePolicy, next_epoch
from tensorhub_core.server.options import machine_config


def test_a_hub_ends_idle_s_after_its_last_worker_left_and_not_before() -> None:
    policy = IdlePolicy(idle_s=60.0, since_s=0.0)
    assert policy.look(59.9, 0, 0) is Idle.STAY
    assert policy.look(70.0, 1, 0) is Idle.STAY, "a worker came in time"
    assert policy.look(500.0, 3, 0) is Idle.STAY
    assert policy.look(559.9, 0, 0) is Idle.STAY
    assert policy.look(560.0, 0, 0) is Idle.WITHDRAW
    assert policy.look(560.0 + LINGER_S - 0.01, 0, 0) is Idle.STAY
    assert policy.look(560.0 + LINGER_S, 0, 0) is Idle.END


def test_a_worker_that_comes_while_the_hub_ends_keeps_it() -> None:
    policy = IdlePolicy(idle_s=1.0, since_s=0.0, first=False)
    assert policy.look(2.0, 0, 0) is Idle.WITHDRAW
    assert policy.look(2.1, 1, 0) is Idle.OFFER
    assert policy.look(900.0, 1, 0) is Idle.STAY
    assert policy.look(901.1, 0, 0) is Idle.WITHDRAW


def test_a_new_hub_waits_for_the_worker_it_was_started_for() -> None:
    policy = IdlePolicy(idle_s=0.0, since_s=0.0)
    assert policy.look(FIRST_WORKER_S - 0.1, 0, 0) is Idle.STAY
    assert policy.look(FIRST_WORKER_S, 0, 0) is Idle.WITHDRAW
    served = IdlePolicy(idle_s=0.0, since_s=0.0)
    served.look(0.1, 1, 1)
    assert served.look(0.2, 0, 1) is Idle.WITHDRAW


def test_a_worker_that_came_and_left_between_two_looks_counts() -> None:
    policy = IdlePolicy(idle_s=1.0, since_s=0.0)
    assert policy.look(0.3, 0, 1) is Idle.STAY
    assert policy.look(1.2, 0, 1) is Idle.STAY
    assert policy.look(1.4, 0, 1) is Idle.WITHDRAW
    assert policy.look(1.5, 0, 2) is Idle.OFFER


@pytest.mark.parametrize("seed", range(20))
def test_a_hub_with_workers_is_always_offered_and_never_ends(seed: int) -> None:
    chance = random.Random(seed)
    policy, now, offered = IdlePolicy(idle_s=chance.choice([0.0, 0.5, 5.0]), since_s=0.0), 0.0, True
    for _ in range(2000):
        now += chance.expovariate(2.0)
        workers = chance.choice([0, 0, 0, 1])
        decision = policy.look(now, workers, 0)
        offered = {Idle.WITHDRAW: False, Idle.OFFER: True}.get(decision, offered)
        if workers:
            assert decision in (Idle.STAY, Idle.OFFER)
            assert offered
        if decision is Idle.END:
            assert not offered
            return


def test_the_runtime_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0o777))  # whatever the umask is
    folder = runtime_folder(str(tmp_path / "a" / "b"), {})
    assert folder.stat().st_mode & 0o777 == 0o700
    assert runtime_folder(str(folder), {}) == folder


def test_the_session_folder_is_taken_if_it_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    assert runtime_folder(None, {"XDG_RUNTIME_DIR": str(session)}) == session / "tensorhub"
    session.chmod(0o755)
    mine = tmp_path / f"tensorhub-{os.getuid()}"
    for environ in ({"XDG_RUNTIME_DIR": str(session)}, {"XDG_RUNTIME_DIR": str(tmp_path / "no")}, {}):
        assert runtime_folder(None, environ) == mine


@pytest.mark.parametrize("kind", ["group", "world", "link", "file"])
def test_a_folder_that_others_can_use_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o750 if kind == "group" else 0o707)
    with pytest.raises(ConfigError, match=str(folder)):
        runtime_folder(str(folder), {})


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match=str(folder)):
        runtime_folder(str(folder), {})


def test_the_epoch_only_grows_also_with_a_clock_that_went_back_or_a_lost_file(tmp_path: Path) -> None:
    assert next_epoch(tmp_path, 1000) == 1000
    assert next_epoch(tmp_path, 1000) == 1001
    assert next_epoch(tmp_path, 5) == 1002
    (tmp_path / "epoch").write_bytes(b"\xffdamaged")
    assert next_epoch(tmp_path, 2000) == 2000
    (tmp_path / "epoch").unlink()
    assert next_epoch(tmp_path, 2001) == 2001


@pytest.mark.parametrize("content", [b"", b"{", b'{"address": 5}', b"\xff\xfe", b'{"address":"ipc:///x"}'])
def test_a_damaged_address_file_is_no_address(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "address").write_bytes(content)
    assert read_record(tmp_path) is None


def test_a_lock_has_one_holder_and_is_free_after_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = take_lock(path)
    assert first is not None
    assert take_lock(path) is None
    assert same_file(first, path)
    path.unlink()
    assert not same_file(first, path)
    path.write_text("")
    assert not same_file(first, path)
    free_lock(first)
    second = take_lock(path)
    assert second is not None
    free_lock(second)


def test_a_lock_is_freed_although_a_forked_child_has_its_handle(tmp_path: Path) -> None:
    handle = take_lock(tmp_path / "lock")
    assert handle is not None
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_write)
        os.read(go_read, 1)
        os._exit(0)
    free_lock(handle)
    again = take_lock(tmp_path / "lock")
    os.close(go_write)
    os.waitpid(child, 0)
    os.close(go_read)
    assert again is not None
    free_lock(again)


def test_files_are_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "address"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["address"]


def test_a_path_that_nobody_listens_on_accepts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file", tmp_path / ("x" * 200), Path("a\0b")):
        assert not accepts(path)


def test_the_log_is_limited_per_kind_and_counts_what_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog(logging.getLogger("tensorhub.test"), every_s=5.0)
    with caplog.at_level(logging.WARNING, "tensorhub.test"):
        said = [limited.log("a", logging.WARNING, "first kind", now / 10) for now in range(100)]
        assert limited.log("b", logging.WARNING, "second kind", 0.3)
    assert [index for index, was in enumerate(said) if was] == [0, 50]
    assert [record.getMessage() for record in caplog.records] == [
        "first kind",
        "first kind (49 more like it)",
        "second kind",
    ]


def test_a_kind_may_have_several_lines_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    limited = RateLimitedLog(logging.getLogger("tensorhub.test"), every_s=5.0)
    with caplog.at_level(logging.WARNING, "tensorhub.test"):
        said = [limited.log("a", logging.WARNING, "line", now / 10, most=3) for now in range(100)]
    assert [index for index, was in enumerate(said) if was] == [0, 1, 2, 50, 51, 52]
    assert [record.getMessage() for record in caplog.records][3:] == ["line (47 more like it)", "line", "line"]


def test_the_machine_gets_the_settings_and_a_grace_of_one_lease() -> None:
    config = machine_config(ServerConfig(lease_s=7.0, heartbeat_s=2.0), 99)
    assert (config.server_epoch, config.lease_s, config.heartbeat_s, config.grace_s) == (99, 7.0, 2.0, 7.0)
    assert config.dead_after_s > config.lease_s
    assert machine_config(ServerConfig(grace_s=30.0), 1).grace_s == 30.0


def test_how_many_versions_are_retained_can_be_said_by_model() -> None:
    config = machine_config(ServerConfig(retain=2, retain_models=" critic=0, a=b=3 ,"), 1)
    assert [config.retain_of(ModelName(name)) for name in ("policy", "critic", "a=b")] == [2, 0, 3]


@pytest.mark.parametrize("text", ["critic", "critic=", "=1", "critic=-1", "critic=one", "a=1,a=2", "a=1.5"])
def test_impossible_numbers_of_versions_by_model_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="retain_models"):
        machine_config(ServerConfig(retain_models=text), 1)
