"""A reference server per file and one other process for all tests here; each test has a model of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core import Worker, connect, serve
from tensorhub_core.server.serving import Server
from tests.processes.client.actor import Actor
from tests.processes.client.samples import Tensors, blank, make
from tests.processes.client.steps import read_in_small_steps

LEASE_S = 1.0
QUICK = {"call_timeout_s": 40, "close_timeout_s": 2, "handover_s": 0.5}
LOSSY = "lossy model"
nothing_retained = pytest.mark.parametrize("model", [LOSSY], indirect=True)
"""For tests of what happens when the last copy of a version is gone."""
_models = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Run a server, until the file's last test: other files may break the server's classes."""
    lossy = ",".join(f"{LOSSY} {number}=0" for number in range(1000))
    with serve(lease_s=LEASE_S, heartbeat_s=0.1, settings={"retain_models": lossy}) as running:
        yield running


@pytest.fixture(scope="session")
def other() -> Iterator[Actor]:
    """Run another process, for tests that leave it alive."""
    with Actor() as actor:
        yield actor


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """Return a model's name that no other test uses; nothing is retained of a `LOSSY` one."""
    return f"{getattr(request, 'param', 'model')} {next(_models)}"


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this test's workers read so that a brake at half holds with nearly half missing, on any machine."""
    read_in_small_steps(monkeypatch.setattr)


class Hub:
    """Connects this test's workers: here and in other processes."""

    def __init__(self, server: Server, model: str) -> None:
        self.server, self.model = server, model
        self._workers: list[Worker] = []
        self._remote: list[tuple[Actor, str]] = []
        self._handles = itertools.count()

    def worker(self, replica: str = "reader", **more: Any) -> Worker:
        """Connect a worker of this process."""
        settings = {**QUICK, **more.pop("settings", {})}
        worker = connect(self.server.address, model=self.model, replica=replica, settings=settings, **more)
        self._workers.append(worker)
        return worker

    def reader(self, sample: str, replica: str = "reader", seed: int = 1, **more: Any) -> tuple[Worker, Tensors]:
        """Connect a worker of this process that has registered blank tensors like those of a sample."""
        kinds = {name: more.pop(name) for name in ("mib", "count") if name in more}
        tensors = blank(make(sample, seed, **kinds))
        worker = self.worker(replica, **more)
        worker.register(tensors)
        return worker, tensors

    def remote(self, actor: Actor, replica: str = "trainer", **more: Any) -> str:
        """Connect a worker of another process; return its handle."""
        handle = f"{self.model} {next(self._handles)}"
        settings = {**QUICK, **more.pop("settings", {})}
        actor.do("connect", handle, server=self.server.address, model=self.model, replica=replica, settings=settings)
        assert not more
        self._remote.append((actor, handle))
        return handle

    def publisher(
        self, actor: Actor, sample: str, version: int = 1, seed: int = 1, replica: str = "trainer", **more: Any
    ) -> str:
        """Connect a worker of another process that publishes a sample; return its handle."""
        settings = more.pop("settings", {})
        handle = self.remote(actor, replica, settings=settings)
        actor.do("register", handle, sample=sample, seed=seed, **more)
        actor.do("call", handle, method="publish", version=version)
        return handle

    def close(self) -> None:
        """Close the workers of this process, and of others that are still there."""
        for worker in self._workers:
            worker.close()
        for actor, handle in self._remote:
            if actor.alive:
                actor.do("close", handle)


@pytest.fixture
def here(server: Server, model: str) -> Iterator[Hub]:
    """Connect this test's workers; closed afterwards."""
    hub = Hub(server, model)
    yield hub
    hub.close()
