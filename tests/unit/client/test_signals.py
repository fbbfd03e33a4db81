"""Signal handlers interrupt calls of the worker that they use, at any point; nothing then waits for itself."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import pytest

from tensorhub_core.client import link
from tensorhub_core.client.awaiting import Awaited
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import StateError, VersionUnavailable
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.state.messages import Welcome
from tests.unit.client.hubs import Gate, Hub, blank, equal, hub, in_background, publisher, reader, weights

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def here() -> Iterator[Hub]:
    with hub() as made:
        yield made


def interrupted(call: Callable[[], object], handler: Callable[[], object]) -> BaseException | None:
    """Make a call and have `handler` called by a signal in the middle of it; return the call's error."""
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
    timer.start()
    try:
        call()
    except Exception as error:
        return error
    else:
        return None
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def gone(here: Hub, worker: Worker) -> None:
    """Wait until the server has heard that a worker left, and its threads have ended."""
    looks = here.connect("looks")
    while any(worker.replica in info.replicas for info in looks.versions()) or worker._finalizer.alive:
        time.sleep(0.02)
    assert not worker._session._thread.is_alive()


def test_a_handler_closes_a_worker_whose_round_it_has_interrupted(here: Hub) -> None:
    rollout, _ = reader(here)
    error = interrupted(lambda: rollout.replicate(timeout_s=25.0), rollout.close)
    assert isinstance(error, StateError)
    assert "closed" in str(error)
    gone(here, rollout)


def test_a_handler_closes_a_worker_that_is_being_closed(here: Hub) -> None:
    gate = Gate()
    trainer, rollout = publisher(here, close_timeout_s=1.0), reader(here, executor=gate.executor)[0]
    reads = in_background(lambda: rollout.replicate(timeout_s=3.0))
    assert gate.reached.wait(10.0)
    assert interrupted(trainer.close, trainer.close) is None, "it waits for its reader"
    gone(here, trainer)
    gate.open.set()
    assert isinstance(reads.exception(10.0), VersionUnavailable)


@pytest.mark.parametrize("held", ["the pipe", "the commands"])
def test_a_handler_asks_while_the_call_that_it_interrupted_holds_a_lock(
    here: Hub, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """As if the signal came at the worst moment: the lock is the same thread's."""
    trainer = publisher(here)
    asked: list[Any] = []

    def handler() -> None:
        if not asked:
            asked.append(None)
            asked[0] = trainer.versions()

    if held == "the pipe":
        write = os.write

        def interrupted_write(number: int, data: bytes) -> int:
            if threading.current_thread().name == "calls":
                handler()
            return write(number, data)

        monkeypatch.setattr(link.os, "write", interrupted_write)
    else:

        class Commands(deque[Any]):
            def append(self, item: Any) -> None:
                handler()
                super().append(item)

        trainer._session._commands = Commands()
    thread = threading.Thread(target=trainer.versions, name="calls", daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), "it waits for itself"
    assert [info.version for info in asked[0]] == [1]


def test_what_was_staged_and_lost_makes_room_for_the_next(here: Hub) -> None:
    """An interruption comes between the end of `stage()` and the caller: nobody has what it returned."""
    publisher(here)
    rollout, tensors = reader(here)
    rollout.stage()
    with rollout.stage() as staged:
        with pytest.raises(StateError, match="install"):
            rollout.stage()
        assert staged.install() == 1
    assert equal(tensors, weights())
    rollout.unpublish()
    rollout.stage()
    rollout.register(blank(20))


class Interruption(BaseException):
    """As KeyboardInterrupt is one."""


def awaited() -> tuple[Callable[[], object], Callable[[], object]]:
    answer: Awaited[int] = Awaited()

    def wait() -> None:
        with contextlib.suppress(FutureTimeout):
            answer.result(1e-5)

    return wait, lambda: answer.set_result(1)


def read_job() -> tuple[Callable[[], object], Callable[[], object]]:
    nothing: Any = None
    job = ReadJob(nothing, [], nothing, np.zeros(0, np.bool_), nothing, nothing, nothing)
    return lambda: job.wait(1e-5), lambda: job.finish(ReadOutcome(ReadEnd.CANCELLED, np.zeros(0, np.bool_), 0))


def mailbox() -> tuple[Callable[[], object], Callable[[], object]]:
    box = Mailbox(WorkerCounters())
    box.welcomed(Welcome("w", 1, 1, 0, 1, 1.0, 1.0))
    return lambda: box.wait_for_welcome(1, 1e-5), lambda: box.on_over(StateError("over"))


@pytest.mark.parametrize("kind", [awaited, read_job, mailbox])
def test_an_interrupted_wait_keeps_no_lock_from_other_threads(
    kind: Callable[[], tuple[Callable[[], object], Callable[[], object]]],
) -> None:
    """At whatever moment the signal comes: the session's thread, or the executor's, goes on."""
    chance = random.Random(1)
    armed = False

    def interrupt(*_: object) -> None:
        if armed:
            raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            wait, give = kind()
            with contextlib.suppress(Interruption):
                armed = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-4))
                while True:
                    wait()
            armed = False
            thread = threading.Thread(target=give, daemon=True)
            thread.start()
            thread.join(5.0)
            assert not thread.is_alive(), "it waits for a lock that the interrupted call has left held"
            wait()
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
