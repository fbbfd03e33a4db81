"""Whatever answers at an address, addresses and names that cannot be, forks that do not care, and leaving for good."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from tensorhub_core import ConfigError, ServerUnreachable, Worker, connect
from tensorhub_core.client.oneshot import ask
from tensorhub_core.state.messages import GetStatus, StatusReply
from tests.processes.client.conftest import LEASE_S, Hub

pytestmark = pytest.mark.timeout(90)
IMPATIENT = {"connect_timeout_s": 0.6}
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00NULL" + bytes(48)


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None] | None) -> Iterator[str]:
    """Listen on a TCP port; `answer` talks with every connection, None never accepts one."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        assert answer is not None
                        answer(connection)

        thread = threading.Thread(target=run, daemon=True)
        if answer is not None:
            thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    if answer is not None:
        thread.join(10)


def talk(data: bytes, then_s: float = 2.0) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.settimeout(then_s)
        while connection.recv(1 << 16):
            pass

    return answer


LISTENERS = {
    "never accepts": None,
    "closes": lambda connection: None,
    "says nothing": talk(b""),
    "talks HTTP": talk(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "talks noise": talk(bytes(range(256)) * 64),
    "greets and stops": talk(GREETING),
}


@pytest.mark.parametrize("kind", LISTENERS)
def test_a_port_of_another_program_is_named_in_time(kind: str) -> None:
    with listening(LISTENERS[kind]) as address:
        begun = time.monotonic()
        with pytest.raises(ServerUnreachable, match=address):
            connect(address, model="m", settings=IMPATIENT)
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.REP, zmq.PUB, zmq.PULL, zmq.DEALER])
def test_another_program_on_zeromq_is_named_in_time(kind: int) -> None:
    with zmq.Context() as context, context.socket(kind) as other:
        other.linger = 0
        address = f"tcp://127.0.0.1:{other.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(ServerUnreachable, match=address):
            connect(address, model="m", settings=IMPATIENT)


@pytest.mark.parametrize("address", ["127.0.0.1:7077", "http://h:1", "tcp://a b:1", "tcp://h\ud800:1", "tcp://*:1", 3])
def test_what_is_no_address_is_refused_at_once_and_leaves_nothing(address: Any) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="address"):
        connect(address, model="m")
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": 3},
        {"model": "\ud800"},
        {"model": "x" * 5000},
        {"replica": "\udfff"},
        {"stream": "\ud800"},
        {"zone": 1},
        {"host": b"h"},
        {"shard": "0"},
        {"num_shards": 1.0},
    ],
    ids=str,
)
def test_who_cannot_be_anybody_is_refused(here: Hub, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        connect(here.server.address, **{"model": here.model, **wrong})


def test_odd_names_of_models_and_replicas_are_names(here: Hub) -> None:
    odd = "a b\n/é🙂"
    rank: Any = np.int64(0)
    with connect(here.server.address, model=here.model + odd, replica=odd, shard=rank, zone=odd) as trainer:
        trainer.register({"w": np.ones(3)})
        trainer.publish(1)
        assert [info.replicas for info in trainer.versions()] == [(odd,)]


def test_a_worker_that_left_does_not_come_back(here: Hub) -> None:
    """A word after the goodbye, such as a heartbeat, would make the server ask who this is."""
    server = here.server
    for number in range(30):
        connect(server.address, model=here.model, replica=f"r{number}").close()
    time.sleep(0.2)
    with connect(server.address, model=here.model, replica="looks") as worker:
        assert worker.replica == "looks"
        reply = ask(server.address, GetStatus())
        assert isinstance(reply, StatusReply)
        found = [model for model in reply.models if model.model == here.model]
    assert [replica.replica for replica in found[0].replicas] == ["looks"]


def nothing(workers: list[Worker]) -> None:
    assert workers


def drop(workers: list[Worker]) -> None:
    workers.clear()
    gc.collect()


def close(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("child", [nothing, drop, close])
def test_children_that_do_not_use_the_workers_do_no_harm(here: Hub, child: Callable[[list[Worker]], None]) -> None:
    """As a trainer's data loaders are."""
    here.worker("trainer")
    here.worker("reader")
    workers = here._workers
    arrays = [{"w": np.full(100_000, value)} for value in (1.0, 0.0)]
    workers[0].register(arrays[0])
    workers[1].register(arrays[1])
    workers[0].publish(1)
    workers[1].replicate()
    pid = os.fork()
    if pid == 0:
        status = 9
        try:
            child(workers)
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 30
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    if not ended[0]:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert ended[0], "the child hung"
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    time.sleep(LEASE_S)
    late, array = here.worker("late"), {"w": np.zeros(100_000)}
    late.register(array)
    assert late.replicate() == 1
    assert (array["w"] == 1).all()
    assert set(late.versions()[-1].replicas) == {"trainer", "reader", "late"}
    workers[0].unpublish()
    workers[0].publish(2)
    assert workers[1].update() == 2


def test_a_child_ends_whatever_its_parents_threads_were_doing_when_it_was_forked(here: Hub) -> None:
    """Locks that they held then are held for ever in the child, which ends what it has of the workers all the same."""
    worker = here.worker("trainer")
    resources = worker._resources
    held = [resources.voucher._lock, resources.offloads._lock, worker._session._lock]
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in held:
                stack.enter_context(lock)
            taken.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    pid = os.fork()
    if pid == 0:
        worker._finalizer()  # as the interpreter does at its end
        os._exit(0)
    end = time.monotonic() + 15
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    over.set()
    thread.join()
    if not ended[0]:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert ended[0], "the child hung"
