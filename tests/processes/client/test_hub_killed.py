"""A hub of its own process is killed and started again while workers read, stage, publish and withdraw."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bench.common import hub

from tensorhub_core import Worker, connect
from tests.processes.client.samples import Tensors, blank, make, same
from tests.processes.client.test_cases_holders import MIB, TOTAL_BYTES, until
from tests.processes.client.test_faults import BY, SMALL, Brake, in_background

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("small_steps")]
LEASE_S = 2.0


class KilledHub:
    """A hub that can be killed and started again at its address, and workers that it serves."""

    lease_s = LEASE_S

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._workers = self._stack.enter_context(contextlib.ExitStack())
        self._hubs = contextlib.ExitStack()
        self.address, self._pid = "tcp://127.0.0.1:0", 0
        self.start()

    def start(self) -> None:
        options = ("--lease-s", str(self.lease_s), "--heartbeat-s", "0.1")
        self.address, self._pid = self._hubs.enter_context(hub(*options, bind=self.address))

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        self._hubs.close()

    def worker(self, replica: str, tensors: Tensors, **settings: Any) -> Worker:
        settings = {**SMALL, "call_timeout_s": 40, "close_timeout_s": 2, "handover_s": 0.5, **settings}
        worker = connect(self.address, model="m", replica=replica, settings=settings)
        self._workers.callback(worker.close)
        worker.register(tensors)
        return worker

    def close(self) -> None:
        self._stack.close()
        self._hubs.close()


@pytest.fixture
def killed() -> Iterator[KilledHub]:
    made = KilledHub()
    yield made
    made.close()


def everybody_is_back(*workers: Worker) -> Callable[[], bool]:
    """Return what tells whether workers have said hello again since now."""
    before = [worker.counters.reconnects for worker in workers]
    return lambda: all(w.counters.reconnects > n for w, n in zip(workers, before, strict=True))


def fetch(worker: Worker, how: str, brake: Brake) -> int:
    if how == "update":
        return worker.update(progress=brake)
    with worker.stage(progress=brake) as staged:
        return staged.install()


@pytest.mark.parametrize("way", ["auto", "tcp"])
@pytest.mark.parametrize("how", ["update", "stage"])
def test_reads_finish_and_nothing_is_withdrawn_early(killed: KilledHub, how: str, way: str) -> None:
    trainer = killed.worker("trainer", old := make("plain", 1, mib=MIB), **BY[way])
    trainer.publish(1)
    reader = killed.worker("reader", tensors := blank(old), **BY[way])
    assert reader.replicate() == 1
    trainer.unpublish()
    trainer.register(new := make("plain", 2, mib=MIB))
    trainer.publish(2)
    brake, before = Brake(), reader.counters.bytes_read
    reading = in_background(lambda: fetch(reader, how, brake))
    assert brake.half.wait(60)
    back = everybody_is_back(trainer, reader)
    killed.kill()
    withdrawing = in_background(lambda: trainer.unpublish(timeout_s=40))
    killed.start()
    until(back)
    time.sleep(2 * LEASE_S)  # so long a restarted hub listens at most
    assert not withdrawing.done(), "somebody reads it"
    assert not reading.done()
    brake.go.set()
    assert reading.result(60) == 2
    assert same(tensors, new)
    assert reader.counters.bytes_read - before == TOTAL_BYTES, "nothing was read twice"
    withdrawing.result(30)
    fresh = killed.worker("fresh", copied := blank(old), **BY[way])
    assert fresh.replicate() == 2, "the reader is a holder that the hub knows"
    assert same(copied, new)


def test_latest_never_goes_back_and_publishing_waits_for_the_hub(killed: KilledHub) -> None:
    trainer, late = (killed.worker(name, make("plain", 1)) for name in ("trainer", "late"))
    trainer.publish(1)
    assert late.update() == 1
    other = killed.worker("other", tensors := blank(make("plain", 1)))
    for version in (2, 3, 4):
        trainer.unpublish()
        trainer.register(bytes_now := make("plain", version))
        back = everybody_is_back(trainer, late, other)
        killed.kill()
        publishing = in_background(lambda v=version: trainer.publish(v))  # type: ignore[misc]
        asking = in_background(lambda v=version: other.wait(newer_than=v - 1, timeout_s=30))  # type: ignore[misc]
        time.sleep(0.2)
        assert not publishing.done(), "nobody can know of it"
        killed.start()
        assert publishing.result(40) == version
        assert asking.result(40) == version
        until(back)
        assert other.update(timeout_s=30) == version, "also while somebody holds version 1"
        assert same(tensors, bytes_now)
        assert {int(info.version): set(info.replicas) for info in late.versions()} == {
            1: {"late"},
            version: {"trainer", "other"},
        }
        killed.kill()
        killed.start()
        assert other.update(timeout_s=30) == version, "what it holds is the newest it ever heard of"
    trainer.unpublish(timeout_s=30)
    assert late.update(timeout_s=30) == 4


def test_a_publisher_that_is_done_when_the_hub_dies_gets_its_memory_back(killed: KilledHub) -> None:
    """A reader that died together with the hub holds nobody for longer than the time in which the hub listens."""
    trainer = killed.worker("trainer", tensors := make("plain", 1, mib=MIB))
    trainer.publish(1)
    killed.kill()
    withdrawing = in_background(lambda: trainer.unpublish(timeout_s=30))
    killed.start()
    withdrawing.result(30)
    assert trainer.version is None
    for tensor in tensors.values():
        tensor.zero_()
    fresh = killed.worker("fresh", copied := blank(tensors))
    assert fresh.replicate(1) == 1, "a copy was made, of the last version there is"
    assert same(copied, make("plain", 1, mib=MIB))
