"""Connecting: servers that are not there, forks, several hubs at once, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tensorhub_core import (
    ConfigError,
    ProtocolMismatch,
    ServerUnreachable,
    StateError,
    connect,
    serve,
)
from tests.processes.client.conftest import Hub
from tests.processes.client.samples import is_filled, make, same
from tests.unit.client.fake_server import FakeServer
from tests.unit.client.test_session import free_port, silent_listener

pytestmark = pytest.mark.timeout(120)
IMPATIENT = {"connect_timeout_s": 0.7}


@contextlib.contextmanager
def address_of(kind: str) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        if kind == "silent":
            yield stack.enter_context(silent_listener())
        elif kind == "speaks HTTP":
            yield stack.enter_context(silent_listener(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        elif kind == "no such host":
            yield "tcp://no-such-host.invalid:7077"
        else:
            yield f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("kind", ["nobody listens", "silent", "speaks HTTP", "no such host"])
def test_a_server_that_does_not_answer_is_named_in_time(kind: str) -> None:
    with address_of(kind) as address:
        begun = time.monotonic()
        with pytest.raises(ServerUnreachable, match=address):
            connect(address, model="m", settings=IMPATIENT)
        assert time.monotonic() - begun < 10


def test_another_protocol_is_named_at_once() -> None:
    with FakeServer(protocol=7).running() as old, pytest.raises(ProtocolMismatch, match=old.address) as error:
        connect(old.address, model="m", settings={"connect_timeout_s": 60})
    assert "7" in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"server": "localhost:7077"},
        {"shard": 2, "num_shards": 2},
        {"shard": -1},
        {"num_shards": 0},
        {"model": ""},
        {"settings": {"no_such_setting": 1}},
        {"transport": "carrier pigeon"},
        {"cast": "int8"},
    ],
)
def test_impossible_arguments_are_refused(here: Hub, arguments: dict[str, object]) -> None:
    given = {"server": here.server.address, "model": here.model, **arguments}
    with pytest.raises(ConfigError):
        connect(**given)  # type: ignore[arg-type]


def test_replicas_are_distinct_by_default(here: Hub) -> None:
    with connect(here.server.address, model=here.model) as a, connect(here.server.address, model=here.model) as b:
        assert a.replica != b.replica


def test_a_second_process_under_one_name_supersedes_the_first(here: Hub) -> None:
    first, _ = here.reader("plain")
    here.reader("plain")
    time.sleep(0.3)
    with pytest.raises(StateError, match="place"):
        first.versions()


def test_a_forked_child_is_told_to_connect_again_and_can(here: Hub) -> None:
    trainer = here.worker("trainer")
    trainer.register(make("plain", 1))
    trainer.publish(1)
    pid = os.fork()
    if pid == 0:
        os._exit(_child(trainer, here))
    deadline = time.monotonic() + 60
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hung")
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(status) == 0
    reader, tensors = here.reader("plain", "reader 2")
    assert reader.replicate() == 1, "the parent's copy is as it was"
    assert same(tensors, make("plain", 1))


def _child(trainer: object, here: Hub) -> int:
    """Return 0 if every call of the inherited worker is refused clearly, and a new connection works."""
    with contextlib.suppress(BaseException):
        for call in ("unpublish", "versions", "wait", "replicate", "update"):
            try:
                getattr(trainer, call)()
            except StateError as error:
                if "fork" not in str(error):
                    return 2
            else:
                return 3
        trainer.close()  # type: ignore[attr-defined]
        with connect(here.server.address, model=here.model, replica="child") as mine:
            return 0 if [int(info.version) for info in mine.versions()] == [1] else 4
    return 5


def test_two_hubs_in_one_process_do_not_know_each_other() -> None:
    with serve() as one, serve() as two:
        trainers = [connect(hub.address, model="policy", replica="trainer") for hub in (one, two)]
        readers = [connect(hub.address, model="policy", replica="reader") for hub in (one, two)]
        try:
            for seed, (trainer, reader) in enumerate(zip(trainers, readers, strict=True)):
                trainer.register(make("plain", seed))
                trainer.publish(7)
                tensors = make("plain", 9)
                reader.register(tensors)
                assert reader.replicate() == 7
                assert same(tensors, make("plain", seed))
                assert [info.replicas for info in reader.versions()] == [("trainer", "reader")] or [
                    set(info.replicas) for info in reader.versions()
                ] == [{"trainer", "reader"}]
        finally:
            for worker in (*readers, *trainers):
                worker.close()


def test_five_hundred_connections_leave_nothing_behind(here: Hub) -> None:
    process = psutil.Process()

    def one() -> None:
        with connect(here.server.address, model=here.model) as worker:
            worker.versions()

    for _ in range(20):
        one()
    gc.collect()
    threads, files, memory = threading.active_count(), process.num_fds(), process.memory_info().rss
    for _ in range(500):
        one()
    gc.collect()
    end = time.monotonic() + 10
    while (threading.active_count() > threads or process.num_fds() > files + 4) and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= threads
    assert process.num_fds() <= files + 4
    assert process.memory_info().rss - memory < 48 << 20


def test_workers_with_memory_leave_nothing_behind(here: Hub) -> None:
    process = psutil.Process()

    def one(number: int) -> None:
        trainer = here.worker(f"trainer {number}")
        trainer.register(make("plain", 1))
        trainer.publish(1)
        reader, _ = here.reader("plain", f"reader {number}")
        reader.replicate()
        reader.close()
        trainer.close()

    for number in range(3):
        one(number)
    gc.collect()
    threads, files, memory = threading.active_count(), process.num_fds(), process.memory_info().rss
    for number in range(3, 18):
        one(number)
    here._workers.clear()
    gc.collect()
    assert threading.active_count() <= threads
    assert process.num_fds() <= files + 8
    assert process.memory_info().rss - memory < 64 << 20


def test_the_embedded_server_is_shared_and_needs_no_address(tmp_path: object) -> None:
    settings = {"runtime_dir": str(tmp_path), "idle_s": 0.5}
    with connect(model="policy", replica="trainer", settings=settings) as trainer:
        trainer.register(make("plain", 1))
        trainer.publish(1)
        with connect(model="policy", replica="reader", settings=settings) as reader:
            tensors = make("plain", 2)
            assert not is_filled(tensors)
            reader.register(tensors)
            assert reader.replicate() == 1
            assert same(tensors, make("plain", 1))
