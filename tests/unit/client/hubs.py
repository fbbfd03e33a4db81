"""Workers inside this process: a real server, the memory transport, and an executor the test controls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorhub_core.client.identity import Identity
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.session import Session
from tensorhub_core.client.worker import Worker
from tensorhub_core.config import ClientConfig
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.server.serving import Server, serve
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tests.unit.client.fake_executor import FakeExecutor, Job

SENTINEL = 0xA5


@dataclass
class Hub:
    """One server and the workers that a test connects to it."""

    server: Server
    stack: contextlib.ExitStack
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    lives: int = 0

    def connect(self, replica: str = "trainer", *, executor: FakeExecutor | None = None, **more: Any) -> Worker:
        """Connect a worker; it is closed with the hub."""
        self.lives += 1
        fields = {name: more.pop(name) for name in ("shard", "num_shards", "stream", "spot", "model") if name in more}
        identity = Identity(f"token {self.lives}", fields.pop("model", "policy"), replica, **fields)
        quick = {"call_timeout_s": 20.0, "close_timeout_s": 3.0, "handover_s": 0.1, "segment_bytes": 4096}
        config = ClientConfig(**{**quick, **more})
        mailbox = Mailbox(WorkerCounters())
        session = Session(self.server.address, identity, mailbox)
        mailbox.welcomed(session.open(10.0))
        reader = FakeExecutor() if executor is None else executor
        resources = Resources(session, lambda: MemoryTransport(self.network), lambda _: reader)
        return self.stack.enter_context(Worker(identity, config, resources, mailbox))


@contextlib.contextmanager
def hub(**more: Any) -> Iterator[Hub]:
    """Run a server for the block."""
    with serve(**{"lease_s": 1.0, "heartbeat_s": 0.1, **more}) as server, contextlib.ExitStack() as stack:
        yield Hub(server, stack)


def weights(seed: int = 0, rows: int = 3000) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {"w": rng.random((rows, 4), np.float32), "b": rng.random(7)}


def blank(rows: int = 3000) -> dict[str, np.ndarray[Any, Any]]:
    made = weights(0, rows)
    for array in made.values():
        array.view(np.uint8)[...] = SENTINEL
    return made


def untouched(tensors: dict[str, np.ndarray[Any, Any]]) -> bool:
    return all((array.view(np.uint8) == SENTINEL).all() for array in tensors.values())


def equal(a: dict[str, np.ndarray[Any, Any]], b: dict[str, np.ndarray[Any, Any]]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


def publisher(here: Hub, version: int = 1, seed: int = 0, replica: str = "trainer", **more: Any) -> Any:
    worker = here.connect(replica, **more)
    worker.register(weights(seed))
    worker.publish(version)
    return worker


def reader(here: Hub, replica: str = "rollout", **more: Any) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    worker, tensors = here.connect(replica, **more), blank()
    worker.register(tensors)
    return worker, tensors


def in_background(call: Callable[[], Any]) -> Any:
    """Start a call on a thread; return its future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


class Gate:
    """Holds the reads of an executor from a given one on until it is opened."""

    def __init__(self, at: int = 1) -> None:
        self.at, self.open, self.reached = at, threading.Event(), threading.Event()
        self.executor = FakeExecutor(self._before)

    def _before(self, job: Job, read: int) -> None:
        if read >= self.at:
            self.reached.set()
            job.until(self.open.is_set)


def next_version(trainer: Any, version: int, seed: int) -> None:
    """Let a trainer publish other weights."""
    trainer.unpublish()
    trainer.register(weights(seed))
    trainer.publish(version)


def holder(here: Hub, **more: Any) -> tuple[Any, Any, dict[str, np.ndarray[Any, Any]]]:
    """Return a trainer that publishes version 2, and a reader with its tensors that publishes version 1."""
    trainer = publisher(here)
    rollout, tensors = reader(here, **more)
    rollout.replicate()
    next_version(trainer, 2, 5)
    return trainer, rollout, tensors


class SecondGate(Gate):
    """A gate that lets the first job pass."""

    def _before(self, job: Job, read: int) -> None:
        if len(self.executor.jobs) > 1:
            super()._before(job, read)
