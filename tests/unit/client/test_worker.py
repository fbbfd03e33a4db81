"""The worker's handle against a real server, with an executor that does what the test says."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.client.versions import Version
from tensorhub_core.errors import (
    ConfigError,
    DeadlineExceeded,
    LayoutMismatch,
    RegistrationError,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub_core.state.messages import Publish
from tests.unit.client.hubs import Hub, blank, equal, hub, in_background, publisher, reader, untouched, weights

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Hub]:
    with hub(**getattr(request, "param", {})) as made:
        yield made


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


@pytest.mark.parametrize("here", [{"retain": 0}], indirect=True, ids=["retaining nothing"])
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


def test_a_worker_that_is_forgotten_gives_everything_back(here: Hub) -> None:
    trainer = publisher(here)
    session, resources = trainer._session, trainer._resources
    here.stack.pop_all()
    del trainer
    gc.collect()
    assert resources.memory is None
    with pytest.raises(StateError):
        session.submit(None, lambda _: None)


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


def test_other_memory_never_passes_for_the_version_that_was_held_back(here: Hub) -> None:
    publisher(here)
    rollout, _ = reader(here)
    rollout.replicate(publish=False)
    other = blank()
    rollout.register(other)
    assert rollout.version is None
    assert rollout.update() == 1
    assert equal(other, weights()), "the new memory was filled, not taken for full"


def test_a_publish_of_unknown_end_is_taken_back(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = here.connect(call_timeout_s=5.0)
    tensors = weights()
    trainer.register(tensors)
    real = trainer._session.request

    def request(message: Any, deadline: Any) -> Any:
        reply = real(message, deadline)
        if isinstance(message, Publish):
            raise DeadlineExceeded("the answer came too late")
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(trainer._session, "request", request)
        with pytest.raises(DeadlineExceeded):
            trainer.publish(1)
    with pytest.raises(StateError, match="unpublish"):
        trainer.publish(1)
    trainer.unpublish()
    trainer.publish(1)
    rollout, copied = reader(here)
    assert rollout.replicate() == 1
    assert equal(copied, tensors)
