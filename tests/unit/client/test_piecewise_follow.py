"""Versions that pass through bounded memory while the server restarts, and from copies that are not whole yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorhub_core import connect
from tensorhub_core.transport.memory import MemoryTransport
from tests.unit.client.hubs import in_background
from tests.unit.client.piecewise_world import QUICK, Here, Loader, passed, run_server, weights, world

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def here() -> Iterator[Here]:
    with world() as made:
        yield made


def restart(here: Here) -> None:
    """End the server, and start one that knows nothing at its address."""
    address = here.server.address
    here.server.close()
    here.server = run_server(address)


def test_a_restart_of_the_server_does_not_stop_what_passes(here: Here) -> None:
    tensors = weights(1)
    here.trainer(tensors)
    states: list[str] = []

    def before(name: str) -> None:
        if name == "layer.3.weight" and not states:
            states.append(name)
            restart(here)
            time.sleep(0.5)

    loader, reader = Loader(before), here.reader()
    assert passed(reader, tensors, loader)[0] == 1
    assert loader.has(tensors)
    assert loader.calls == 1, "the very same memory goes on to be read"
    assert reader.counters.reconnects >= 1
    assert passed(reader, tensors, Loader())[0] == 1


class Slow:
    """A plain reader whose reads go on step by step."""

    def __init__(self, here: Here) -> None:
        self.steps = threading.Semaphore(0)
        self.free = False
        self.reached = threading.Event()
        transport = MemoryTransport(here.network)
        settings = {**QUICK, "window": 1}
        worker = connect(here.server.address, model="policy", replica="slow", transport=transport, settings=settings)
        self.worker = here.stack.enter_context(worker)
        self.tensors = {name: np.zeros_like(tensor) for name, tensor in weights(0).items()}
        self.worker.register(self.tensors)
        self.filling = in_background(lambda: self.worker.replicate(1, 60.0, self._progress))

    def _progress(self, *_: Any) -> None:
        self.reached.set()
        if not self.free:
            self.steps.acquire(timeout=30)


@pytest.mark.parametrize("restarts", [False, True])
def test_an_unfinished_copy_is_followed_from_piece_to_piece(here: Here, restarts: bool) -> None:
    tensors = weights(1)
    here.trainer(tensors)
    slow = Slow(here)
    assert slow.reached.wait(10)
    sources: set[str] = set()
    loader = Loader()

    def run() -> Any:
        with here.reader().passing(
            [(name, str(t.dtype), t.shape) for name, t in tensors.items()],
            1,
            60.0,
            lambda done, total, source: sources.add(source),
        ) as passing:
            assert passing.begins()
            return passing.use(loader)

    passing = in_background(run)
    until_s = time.monotonic() + 20
    for _ in range(3):
        slow.steps.release()
        time.sleep(0.15)
    while not loader.got and time.monotonic() < until_s and not restarts:
        slow.steps.release()
        time.sleep(0.05)
    if restarts:
        restart(here)
        time.sleep(1.5)
    slow.free = True
    slow.steps.release(100)
    assert passing.result(60)[0] == 1
    assert slow.filling.result(30) == 1
    assert loader.has(tensors)
    assert "slow" in sources
    assert loader.calls == 1
