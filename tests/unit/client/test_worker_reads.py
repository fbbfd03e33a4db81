"""Reads of a worker that are held, broken, interrupted or closed under it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core.client.driver import RoundDriver
from tensorhub_core.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    StateError,
    TransportError,
    VersionUnavailable,
)
from tests.unit.client.fake_executor import FakeExecutor, Job, SourceBroken
from tests.unit.client.hubs import Gate, Hub, equal, hub, in_background, publisher, reader, weights

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here() -> Iterator[Hub]:
    with hub() as made:
        yield made


def test_the_deadline_ends_the_read_and_the_memory_is_dirty(here: Hub) -> None:
    publisher(here)
    gate = Gate()
    rollout, tensors = reader(here, executor=gate.executor)
    with pytest.raises(DeadlineExceeded):
        rollout.replicate(timeout_s=0.5)
    assert gate.reached.is_set()
    assert not gate.executor.jobs[0].thread.is_alive(), "nothing lands any more"
    assert rollout.version is None
    with pytest.raises(StateError, match="dirty"):
        rollout.publish(1)
    gate.open.set()
    assert rollout.replicate() == 1
    assert equal(tensors, weights())


def test_dirty_memory_may_be_published_when_it_was_rewritten(here: Hub) -> None:
    publisher(here)
    gate = Gate()
    rollout, tensors = reader(here, executor=gate.executor)
    with pytest.raises(DeadlineExceeded):
        rollout.replicate(timeout_s=0.3)
    for name, array in weights(8).items():
        tensors[name][...] = array
    assert rollout.publish(2, fresh=True) == 2
    other, copied = reader(here, "other")
    assert other.replicate(2) == 2
    assert equal(copied, weights(8))


def test_unpublish_waits_for_readers_and_goes_on_after_its_deadline(here: Hub) -> None:
    trainer = publisher(here)
    gate = Gate()
    rollout, tensors = reader(here, executor=gate.executor)
    reading = in_background(rollout.replicate)
    assert gate.reached.wait(10)
    with pytest.raises(DeadlineExceeded):
        trainer.unpublish(timeout_s=0.3)
    for call in (lambda: trainer.publish(2), lambda: trainer.replicate()):
        with pytest.raises(StateError, match="draining"):
            call()
    waiting = in_background(trainer.unpublish)
    time.sleep(0.2)
    assert not waiting.done()
    gate.open.set()
    assert reading.result(10) == 1
    waiting.result(10)
    assert equal(tensors, weights())
    trainer.publish(2)


def test_a_source_that_fails_is_left_for_another_and_only_the_rest_is_read(here: Hub) -> None:
    publisher(here)
    second, _ = reader(here, "second")
    second.replicate()
    failed: list[str] = []

    def fail_once(job: Job, read: int) -> None:
        if read == 2 and not failed:
            failed.append(job.sources[0].replica)
            raise SourceBroken("lost")

    executor = FakeExecutor(fail_once)
    rollout, tensors = reader(here, executor=executor)
    assert rollout.replicate() == 1
    assert equal(tensors, weights())
    first, rest = executor.jobs
    assert first.sources[0].replica != rest.sources[0].replica
    assert set(first.read) & set(rest.read) == set()
    assert rollout.counters.failovers == 1
    assert rollout.counters.bytes_read == sum(array.nbytes for array in tensors.values())


def test_a_source_that_leaves_is_lost_and_another_one_goes_on(here: Hub) -> None:
    holders = {"trainer": publisher(here, close_timeout_s=0.2)}
    holders["second"], _ = reader(here, "second", close_timeout_s=0.2)
    holders["second"].replicate()
    gate = Gate(2)
    rollout, tensors = reader(here, executor=gate.executor)
    reading = in_background(rollout.replicate)
    assert gate.reached.wait(10)
    first = gate.executor.jobs[0]
    holders[first.sources[0].replica].close()
    first.thread.join(10)
    assert first.outcome is not None
    assert first.outcome.kind == "lost"
    gate.open.set()
    assert reading.result(10) == 1
    assert equal(tensors, weights())
    assert rollout.counters.failovers == 1


def test_corrupt_bytes_of_the_only_holder_are_an_error_and_never_offered(here: Hub) -> None:
    trainer = publisher(here)
    buffer = trainer._resources.memory.buffers[-1]
    buffer[5] ^= 1
    rollout, _ = reader(here)
    with pytest.raises(CorruptTransfer, match="trainer"):
        rollout.replicate()
    assert rollout.version is None
    (info,) = rollout.versions()
    assert info.replicas == ("trainer",)


@pytest.mark.parametrize("where", ["first", "last"])
def test_an_error_of_the_progress_callback_is_the_calls_error(here: Hub, where: str) -> None:
    publisher(here)
    rollout, tensors = reader(here)
    total = sum(array.nbytes for array in tensors.values())

    def progress(done: int, all_bytes: int, source: str) -> None:
        assert (all_bytes, source) == (total, "trainer")
        if where == "first" or done == all_bytes:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        rollout.replicate(progress=progress)
    assert rollout.replicate() == 1
    assert equal(tensors, weights())


def test_progress_comes_seldom_and_ends_with_everything(here: Hub) -> None:
    publisher(here)
    calls: list[tuple[float, int, int, str]] = []
    executor = FakeExecutor(lambda job, read: time.sleep(0.02))
    rollout, _ = reader(here, executor=executor)
    rollout.replicate(progress=lambda done, total, source: calls.append((time.monotonic(), done, total, source)))
    assert calls[-1][1] == calls[-1][2]
    assert [done for _, done, _, _ in calls] == sorted(done for _, done, _, _ in calls)
    for begin, *_ in calls:
        assert sum(begin <= at < begin + 1 for at, *_ in calls) <= 10


def test_a_second_thread_is_told_that_the_memory_is_in_use(here: Hub) -> None:
    publisher(here)
    gate = Gate()
    rollout, _ = reader(here, executor=gate.executor)
    reading = in_background(rollout.replicate)
    assert gate.reached.wait(10)
    with pytest.raises(StateError, match=r"replicate\(\) runs in another thread"):
        rollout.publish(1)
    assert rollout.wait(timeout_s=5) == 1
    gate.open.set()
    assert reading.result(10) == 1


def test_close_ends_a_call_in_flight(here: Hub) -> None:
    publisher(here)
    gate = Gate()
    rollout, _ = reader(here, executor=gate.executor)
    reading = in_background(rollout.replicate)
    assert gate.reached.wait(10)
    rollout.close()
    with pytest.raises(StateError, match="closed"):
        reading.result(10)
    for call in (rollout.replicate, rollout.versions, rollout.wait, lambda: rollout.publish(1)):
        with pytest.raises(StateError, match="closed"):
            call()
    rollout.close()


def test_close_waits_for_readers_but_not_for_ever(here: Hub) -> None:
    trainer = publisher(here, close_timeout_s=0.5)
    gate = Gate()
    rollout, _ = reader(here, executor=gate.executor)
    reading = in_background(rollout.replicate)
    assert gate.reached.wait(10)
    begun = time.monotonic()
    trainer.close()
    assert 0.4 < time.monotonic() - begun < 8
    with pytest.raises(VersionUnavailable):
        reading.result(20)
    assert rollout.version is None


def test_an_interrupt_stops_the_read_before_it_is_raised(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher(here)
    gate = Gate()
    rollout, _ = reader(here, executor=gate.executor)
    real = Job.wait
    interrupted: list[int] = []

    def wait(job: Job, timeout_s: float) -> Any:
        if gate.reached.is_set() and not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        return real(job, timeout_s)

    monkeypatch.setattr(Job, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        rollout.replicate()
    assert not gate.executor.jobs[0].thread.is_alive()
    assert rollout.version is None
    gate.open.set()
    assert rollout.replicate() == 1


class BrokenJob(Job):
    """A read job that its executor breaks."""

    def wait(self, timeout_s: float) -> Any:
        raise TransportError("the executor itself is broken")


def test_an_error_of_the_executor_ends_the_worker_because_bytes_may_still_land(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher(here)
    rollout, _ = reader(here)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "wait", BrokenJob.wait)
        with pytest.raises(TransportError, match="broken"):
            rollout.replicate(timeout_s=10)
    with pytest.raises(StateError, match="closed"):
        rollout.replicate()


def test_an_executor_that_cannot_start_is_an_error_and_the_worker_goes_on(here: Hub) -> None:
    publisher(here)

    class Refusing(FakeExecutor):
        refuse = True

        def start(self, *arguments: Any) -> Job:
            if self.refuse:
                raise TransportError("no reading side")
            return super().start(*arguments)

    executor = Refusing()
    rollout, tensors = reader(here, executor=executor)
    with pytest.raises(TransportError, match="no reading side"):
        rollout.replicate(timeout_s=10)
    executor.refuse = False
    assert rollout.replicate() == 1
    assert equal(tensors, weights())


@pytest.mark.parametrize("slow", ["planning", "withdrawing"])
def test_progress_of_a_source_counts_that_came_before_the_read_began(
    here: Hub, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is whole before its reader starts, and says nothing more: the reader must know it by then."""
    publisher(here)
    gate = Gate(1)
    first, _ = reader(here, "first", executor=gate.executor)
    filling = in_background(first.replicate)
    assert gate.reached.wait(10)
    second, tensors = reader(here, "second")
    name = "_make_plan" if slow == "planning" else "_read"
    real = getattr(RoundDriver, name)

    def wait_first(driver: RoundDriver, *arguments: Any) -> None:
        if driver._parts.memory is second._resources.memory and driver.state.sources[0].replica == "first":
            real(driver, *arguments) if slow == "planning" else None
            gate.open.set()
            assert filling.result(10) == 1
            time.sleep(0.2)
            return None if slow == "planning" else real(driver, *arguments)
        return real(driver, *arguments)

    monkeypatch.setattr(RoundDriver, name, wait_first)
    assert second.replicate(timeout_s=10) == 1
    assert equal(tensors, weights())
    assert gate.open.is_set(), "the second did not follow the first"


def test_a_round_that_is_over_goes_at_once(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with some later collection: it holds the memory that it filled."""
    rounds: list[weakref.ref[RoundDriver]] = []
    real = RoundDriver.run

    def run(driver: RoundDriver) -> Any:
        rounds.append(weakref.ref(driver))
        return real(driver)

    publisher(here)
    rollout, _ = reader(here)
    monkeypatch.setattr(RoundDriver, "run", run)
    gc.disable()
    try:
        assert rollout.replicate(publish=False) == 1
        with rollout.stage(1):
            pass
    finally:
        gc.enable()
    assert rounds
    assert [driver() for driver in rounds] == [None] * len(rounds)
