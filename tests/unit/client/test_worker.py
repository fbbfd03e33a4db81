"""The worker's handle against a real server, with an executor that does what the test says."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.client.versions import Version
from tensorhub_core.errors import (
    ConfigError,
    CorruptTransfer,
    DeadlineExceeded,
    LayoutMismatch,
    RegistrationError,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tests.unit.client.fake_executor import FakeExecutor, Job, SourceBroken
from tests.unit.client.hubs import Hub, hub

pytestmark = pytest.mark.timeout(60)
SENTINEL = 0xA5


@pytest.fixture
def here() -> Iterator[Hub]:
    with hub() as made:
        yield made


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


class Gate:
    """Holds the reads of an executor from a given one on until it is opened."""

    def __init__(self, at: int = 1) -> None:
        self.at, self.open, self.reached = at, threading.Event(), threading.Event()
        self.executor = FakeExecutor(self._before)

    def _before(self, job: Job, read: int) -> None:
        if read >= self.at:
            self.reached.set()
            job.until(self.open.is_set)


def in_background(call: Callable[[], Any]) -> Any:
    """Start a call on a thread; return its future."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def test_a_version_moves_and_its_reader_becomes_a_holder(here: Hub) -> None:
    trainer = publisher(here)
    rollout, tensors = reader(here)
    assert rollout.version is None
    version = rollout.replicate()
    assert (version, version.epoch, rollout.version) == (1, 1, version)
    assert equal(tensors, weights())
    trainer.unpublish()
    assert trainer.version is None
    other, copied = reader(here, "rollout-2")
    assert other.replicate(1) == 1
    assert equal(copied, weights())
    (info,) = other.versions()
    assert (info.version, info.whole, set(info.replicas)) == (1, True, {"rollout", "rollout-2"})
    assert rollout.counters.commits == 1
    assert rollout.counters.bytes_read == sum(array.nbytes for array in tensors.values())


def test_update_follows_the_trainer_and_returns_at_once_when_there(here: Hub) -> None:
    trainer = publisher(here)
    rollout, tensors = reader(here)
    assert rollout.update() == 1
    assert rollout.update() == 1
    assert rollout.counters.commits == 1
    trainer.unpublish()
    trainer.register(weights(5))
    trainer.publish(2)
    assert rollout.wait(newer_than=1) == 2
    assert rollout.update() == 2
    assert equal(tensors, weights(5))
    assert rollout.counters.drains == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w: w.publish(1), "register"),
        (lambda w: w.replicate(), "register"),
        (lambda w: w.update(), "register"),
    ],
)
def test_register_comes_first(here: Hub, call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(StateError, match=text):
        call(here.connect())


def test_calls_that_do_not_fit_the_published_state(here: Hub) -> None:
    trainer = publisher(here, 3)
    for call in (lambda: trainer.replicate(), lambda: trainer.publish(4), lambda: trainer.register(weights())):
        with pytest.raises(StateError, match="unpublish"):
            call()
    again = trainer.publish(3)
    assert (again, again.epoch) == (3, 1)
    trainer.unpublish()
    trainer.unpublish()


@pytest.mark.parametrize("wrong", [-1, "3", None, 1.5, True])
def test_wrong_versions_are_refused(here: Hub, wrong: Any) -> None:
    trainer = publisher(here)
    with pytest.raises(ConfigError):
        trainer.publish(wrong)
    rollout, _ = reader(here)
    with pytest.raises(ConfigError):
        rollout.replicate(wrong)


def test_a_taken_number_is_a_conflict(here: Hub) -> None:
    publisher(here, 3)
    other = here.connect("other")
    other.register(weights(9))
    with pytest.raises(VersionConflict):
        other.publish(3)
    assert other.version is None
    other.publish(4)


def test_a_version_that_never_was_is_waited_for_until_the_deadline(here: Hub) -> None:
    rollout, tensors = reader(here)
    for call in (lambda: rollout.replicate(9, timeout_s=0.2), lambda: rollout.update(timeout_s=0.2)):
        with pytest.raises(DeadlineExceeded, match="promise"):
            call()
    with pytest.raises(DeadlineExceeded, match="wait"):
        rollout.wait(timeout_s=0.2)
    assert untouched(tensors)
    assert rollout.version is None
    publisher(here, 9)
    assert rollout.replicate(9) == 9, "a round that was left does not spoil the next one"


def test_a_version_without_holders_is_unavailable_at_once(here: Hub) -> None:
    trainer = publisher(here)
    trainer.unpublish()
    rollout, tensors = reader(here)
    with pytest.raises(VersionUnavailable):
        rollout.replicate(1)
    assert untouched(tensors)


def test_another_layout_is_refused_before_anything_happens(here: Hub) -> None:
    publisher(here, 1)
    rollout, tensors = reader(here)
    rollout.replicate()
    before = {name: array.copy() for name, array in tensors.items()}
    odd = here.connect("odd")
    changed = weights(1)
    changed["w"] = changed["w"].astype(np.float64)
    changed["extra"] = np.ones(3)
    del changed["b"]
    odd.register(changed)
    odd.publish(2)
    with pytest.raises(LayoutMismatch) as error:
        rollout.update(2)
    assert {"w", "extra", "b"} <= {
        name for name in ["w", "extra", "b"] if any(name in d for d in error.value.differences)
    }
    assert equal(tensors, before)
    assert rollout.version == 1
    assert rollout._holding.published, "the old copy is still offered"
    other, copied = reader(here, "third")
    assert other.replicate(1) == 1
    assert equal(copied, before)


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


def test_a_copy_that_is_not_offered_is_committed_and_can_be_published_later(here: Hub) -> None:
    trainer = publisher(here)
    rollout, tensors = reader(here)
    assert rollout.replicate(publish=False) == 1
    assert rollout.version == 1
    assert rollout.versions()[0].replicas == ("trainer",)
    rollout.publish(1)
    trainer.unpublish()
    other, copied = reader(here, "other")
    assert other.replicate() == 1
    assert equal(copied, weights())
    assert equal(tensors, weights())


def test_processed_memory_is_published_under_its_own_tag(here: Hub) -> None:
    publisher(here)
    rollout, tensors = reader(here)
    rollout.replicate(publish=False)
    tensors["w"] *= 2
    rollout.register(tensors, tag="doubled")
    assert rollout.version is None
    rollout.publish(1)
    plain, plain_tensors = reader(here, "plain")
    plain.replicate(1)
    assert equal(plain_tensors, weights())
    twin, twin_tensors = here.connect("twin"), blank()
    twin.register(twin_tensors, tag="doubled")
    twin.replicate(1)
    assert equal(twin_tensors, tensors)


def test_tensors_that_moved_are_noticed_at_the_next_publish_and_replicate(here: Hub) -> None:
    layer = torch.nn.Linear(4, 4)
    worker = here.connect()
    worker.register(layer.named_parameters())
    worker.publish(1)
    worker.unpublish()
    layer.weight.data = layer.weight.data.clone()
    for call in (lambda: worker.publish(2), lambda: worker.replicate(), lambda: worker.update()):
        with pytest.raises(RegistrationError, match="'weight'"):
            call()
    worker.register(layer.named_parameters())
    worker.publish(2)


def test_read_only_arrays_can_be_published_and_not_filled(here: Hub) -> None:
    tensors = weights()
    tensors["b"].flags.writeable = False
    trainer = here.connect()
    trainer.register(tensors)
    trainer.publish(1)
    trainer.unpublish()
    with pytest.raises(RegistrationError, match="'b'"):
        trainer.replicate()


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


def test_a_worker_that_is_forgotten_gives_everything_back(here: Hub) -> None:
    trainer = publisher(here)
    session, resources = trainer._session, trainer._resources
    here.stack.pop_all()
    del trainer
    gc.collect()
    assert resources.memory is None
    with pytest.raises(StateError):
        session.submit(None, lambda _: None)


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


def test_shards_of_a_replica_get_one_version_and_commit_together(here: Hub) -> None:
    for shard in (0, 1):
        trainer = here.connect("trainer", shard=shard, num_shards=2)
        trainer.register({f"w{shard}": np.full(5000, shard + 1.0)})
        trainer.publish(1)
    readers, tensors = [], []
    for shard in (0, 1):
        worker, memory = here.connect("rollout", shard=shard, num_shards=2), {f"w{shard}": np.zeros(5000)}
        worker.register(memory)
        readers.append(worker)
        tensors.append(memory)
    first = in_background(readers[0].replicate)
    time.sleep(0.1)
    assert not first.done(), "one shard alone is no replica"
    assert readers[1].replicate() == 1
    assert first.result(10) == 1
    assert (tensors[0]["w0"] == 1).all()
    assert (tensors[1]["w1"] == 2).all()


def test_shards_that_ask_for_different_versions_are_refused_and_can_go_on(here: Hub) -> None:
    for number in (1, 2):
        publisher(here, number, seed=number, replica=f"trainer-{number}")
    workers = [here.connect("rollout", shard=shard, num_shards=2) for shard in (0, 1)]
    for worker in workers:
        worker.register(blank())
    first = in_background(lambda: workers[0].replicate(1, timeout_s=10))
    time.sleep(0.1)
    with pytest.raises(StateError, match="different versions"):
        workers[1].replicate(2, timeout_s=10)
    with pytest.raises(StateError, match="different versions"):
        first.result(10)


def test_versions_carry_the_epoch_of_their_stream(here: Hub) -> None:
    first = publisher(here, 10, replica="run-1", stream="run-1")
    rollout, _ = reader(here)
    ten = rollout.update()
    assert (ten, ten.epoch) == (10, 1)
    second = publisher(here, 2, seed=1, replica="run-2", stream="run-2")
    two = rollout.wait(newer_than=ten)
    assert (two, two.epoch) == (2, 2)
    assert rollout.update().key == (2, 2)
    first.unpublish()
    with pytest.raises(VersionConflict):
        first.publish(11)
    assert isinstance(second.version, Version)
