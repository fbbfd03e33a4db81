"""Stage and install of the worker's handle, against a real server, with an executor that does what the test says."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tensorhub_core.errors import (
    ConfigError,
    DeadlineExceeded,
    LayoutMismatch,
    RegistrationError,
    StateError,
    VersionUnavailable,
)
from tensorhub_core.layout.types import Box
from tests.unit.client.fake_executor import FakeExecutor, Job, SourceBroken
from tests.unit.client.hubs import (
    Gate,
    Hub,
    SecondGate,
    blank,
    equal,
    holder,
    hub,
    in_background,
    next_version,
    publisher,
    reader,
    untouched,
    weights,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Hub]:
    with hub(**getattr(request, "param", {})) as made:
        yield made


def test_a_version_is_staged_beside_the_old_one_and_then_installed(here: Hub) -> None:
    _trainer, rollout, tensors = holder(here)
    before = rollout.digest
    with rollout.stage() as staged:
        assert (staged.version, staged.version.epoch, staged.total_bytes) == (
            2,
            1,
            rollout._resources.memory.total_bytes,
        )
        assert (rollout.version, rollout.digest) == (1, before)
        assert equal(tensors, weights())
        assert staged.digest != before
        assert {int(v.version): set(v.replicas) for v in rollout.versions()} == {
            1: {"rollout"},
            2: {"trainer", "rollout"},
        }
        assert staged.install() == 2
        assert (rollout.version, rollout.digest) == (2, staged.digest)
        assert equal(tensors, weights(5))
    assert rollout._resources.room.memory is not None, "kept for the next one"
    rollout.unpublish()
    assert rollout.versions()[-1].replicas == ("trainer",), "neither the memory nor what was staged serves any more"


def test_the_first_version_can_be_staged_too(here: Hub) -> None:
    publisher(here)
    rollout, tensors = reader(here)
    with rollout.stage(1) as staged:
        assert rollout.version is None
        assert untouched(tensors)
        assert staged.install(publish=False) == 1
    assert equal(tensors, weights())
    assert rollout.versions()[0].replicas == ("trainer",)
    assert rollout.publish(1) == 1


def test_the_old_version_can_be_read_during_the_whole_stage(here: Hub) -> None:
    gate = SecondGate(2)
    _trainer, rollout, tensors = holder(here, executor=gate.executor)
    staging = in_background(rollout.stage)
    assert gate.reached.wait(10)
    for replica in ("a", "b"):
        other, copied = reader(here, replica)
        assert other.replicate(1) == 1
        assert equal(copied, weights())
    assert not staging.done()
    assert equal(tensors, weights())
    assert rollout.version == 1
    gate.open.set()
    assert staging.result(10).install() == 2
    assert equal(tensors, weights(5))


def test_others_follow_the_prefix_of_what_is_being_staged(here: Hub) -> None:
    trainer = publisher(here)
    gate = Gate(3)
    rollout, tensors = reader(here, executor=gate.executor)
    staging = in_background(rollout.stage)
    assert gate.reached.wait(10)
    time.sleep(0.2)
    other_executor = FakeExecutor()
    other, copied = reader(here, "other", executor=other_executor)
    reading = in_background(other.replicate)
    while not (other_executor.jobs and len(other_executor.jobs[0].read) == 3):
        time.sleep(0.01)
    (job,) = other_executor.jobs
    assert [source.replica for source in job.sources] == ["rollout"]
    assert untouched(tensors), "it is read from host memory"
    gate.open.set()
    staged = staging.result(10)
    assert reading.result(10) == 1
    assert equal(copied, weights())
    trainer.unpublish()
    late, late_copied = reader(here, "late")
    other.unpublish()
    assert late.replicate() == 1
    assert equal(late_copied, weights())
    staged.discard()


def test_nothing_is_staged_when_the_version_is_held(here: Hub) -> None:
    publisher(here)
    rollout, tensors = reader(here)
    rollout.replicate()
    with rollout.stage() as staged:
        assert (staged.version, staged.digest) == (1, rollout.digest)
        assert staged.install() == 1
    rollout.register(tensors) if rollout.version is None else rollout.unpublish()
    with pytest.raises(StateError, match="stage"):
        staged.install()
    staged.discard()


def test_calls_while_a_version_is_staged(here: Hub) -> None:
    trainer, rollout, tensors = holder(here)
    staged = rollout.stage()
    for call in (rollout.stage, lambda: rollout.register(blank())):
        with pytest.raises(StateError, match="version 2 is staged"):
            call()
    next_version(trainer, 3, 7)
    assert rollout.update() == 3
    with pytest.raises(StateError, match="holds 3"):
        staged.install()
    staged.discard()
    staged.discard()
    assert equal(tensors, weights(7))
    with pytest.raises(StateError, match="not staged any more"):
        staged.install()
    old = publisher(here, 9, seed=9, replica="nine")
    nine = rollout.stage(9)
    next_version(trainer, 10, 10)
    assert rollout.update() == 10
    assert nine.install() == 9, "going back has to be asked for by number"
    assert equal(tensors, weights(9))
    old.unpublish()


def test_register_comes_first_and_versions_are_checked(here: Hub) -> None:
    with pytest.raises(StateError, match="register"):
        here.connect().stage()
    rollout, tensors = reader(here)
    with pytest.raises(ConfigError):
        rollout.stage(-1)
    tensors["b"].flags.writeable = False
    rollout.register(tensors)
    with pytest.raises(RegistrationError, match="'b'"):
        rollout.stage()


def test_discard_frees_the_memory_after_its_readers_have_left(here: Hub) -> None:
    trainer = publisher(here)
    rollout, _ = reader(here)
    staged = rollout.stage()
    trainer.unpublish()
    gate = Gate(2)
    other, copied = reader(here, "other", executor=gate.executor)
    reading = in_background(other.replicate)
    assert gate.reached.wait(10)
    with pytest.raises(DeadlineExceeded):
        staged.discard(timeout_s=0.3)
    assert rollout._resources.room.memory is not None
    discarding = in_background(staged.discard)
    gate.open.set()
    assert reading.result(10) == 1
    discarding.result(10)
    assert equal(copied, weights())
    assert rollout._resources.room.memory is None
    again = rollout.stage()
    assert again.install() == 1


def test_a_block_that_ends_discards_what_was_not_installed(here: Hub) -> None:
    publisher(here)
    rollout, tensors = reader(here)
    with pytest.raises(ZeroDivisionError), rollout.stage():
        raise ZeroDivisionError
    assert rollout._resources.room.memory is None
    assert untouched(tensors)
    with rollout.stage() as staged:
        staged.install()
    staged.discard()
    assert rollout._resources.room.memory is None, "discard() after install() gives the memory back"
    assert rollout.version == 1


def test_memory_is_allocated_once_for_later_versions(here: Hub) -> None:
    trainer, rollout, tensors = holder(here)
    places = []
    for version in (3, 4, 5):
        next_version(trainer, version, version)
        with rollout.stage() as staged:
            places.append(rollout._resources.room.memory.addresses.tolist())
            assert staged.install() == version
        assert equal(tensors, weights(version))
    assert places[0] == places[1] == places[2]
    rollout.unpublish()
    other = {"x": np.zeros(100)}
    rollout.register(other)
    assert rollout._resources.room.memory is None, "other tensors have no use for it"


def test_more_host_memory_than_allowed_is_refused(here: Hub) -> None:
    publisher(here)
    rollout, tensors = reader(here, staging_bytes=10_000)
    with pytest.raises(StateError, match="staging_bytes"):
        rollout.stage()
    assert rollout.replicate() == 1
    assert equal(tensors, weights())


def test_the_deadline_of_a_stage_leaves_the_old_version_published(here: Hub) -> None:
    gate = SecondGate(1)
    _trainer, rollout, tensors = holder(here, executor=gate.executor)
    with pytest.raises(DeadlineExceeded):
        rollout.stage(timeout_s=0.5)
    assert gate.reached.is_set()
    assert rollout.version == 1
    assert equal(tensors, weights())
    assert rollout.versions()[0].replicas == ("rollout",)
    gate.open.set()
    assert rollout.stage().install() == 2
    assert equal(tensors, weights(5))


@pytest.mark.parametrize("here", [{"retain": 0}], indirect=True, ids=["retaining nothing"])
def test_a_version_that_is_gone_is_unavailable(here: Hub) -> None:
    trainer = publisher(here)
    trainer.unpublish()
    rollout, tensors = reader(here)
    with pytest.raises(VersionUnavailable):
        rollout.stage()
    assert untouched(tensors)
    trainer.publish(2)
    assert rollout.stage().install() == 2


def test_a_source_that_fails_during_a_stage_is_left_for_another(here: Hub) -> None:
    publisher(here)
    second, _ = reader(here, "second")
    second.replicate()
    failed: list[str] = []

    def fail_once(job: Job, read: int) -> None:
        if read == 2 and not failed:
            failed.append("once")
            raise SourceBroken("lost")

    rollout, tensors = reader(here, executor=FakeExecutor(fail_once))
    with rollout.stage() as staged:
        assert rollout.counters.failovers == 1
        staged.install()
    assert equal(tensors, weights())


def test_progress_of_stage_and_install(here: Hub) -> None:
    publisher(here)
    rollout, _ = reader(here)
    heard: list[tuple[int, int, str]] = []
    rollout.stage(progress=lambda *figures: heard.append(figures)).install()
    total = rollout._resources.memory.total_bytes
    assert heard[-1] == (total, total, "trainer")


def test_a_worker_that_closes_gives_up_what_it_staged(here: Hub) -> None:
    publisher(here)
    rollout, tensors = reader(here)
    staged = rollout.stage()
    rollout.close()
    staged.discard()
    with staged:
        pass
    with pytest.raises(StateError, match="closed"):
        staged.install()
    assert rollout._resources.room.memory is None
    assert untouched(tensors)


def test_tensors_that_moved_since_the_stage_are_noticed(here: Hub) -> None:
    publisher(here)
    layer = torch.nn.Linear(4, 4)
    trainer = here.connect("other", model="linear")
    trainer.register(torch.nn.Linear(4, 4).named_parameters())
    trainer.publish(1)
    worker = here.connect("reader", model="linear")
    worker.register(layer.named_parameters())
    staged = worker.stage()
    layer.weight.data = layer.weight.data.clone()
    with pytest.raises(RegistrationError, match="'weight'"):
        staged.install()
    staged.discard()


def test_the_next_stage_waits_for_readers_of_what_was_installed(here: Hub) -> None:
    trainer, rollout, _ = holder(here)
    staged = rollout.stage()
    trainer.unpublish()
    gate = Gate(2)
    other, copied = reader(here, "other", executor=gate.executor)
    reading = in_background(lambda: other.replicate(2))
    assert gate.reached.wait(10)
    assert staged.install() == 2
    trainer.register(weights(6))
    trainer.publish(3)
    with pytest.raises(DeadlineExceeded, match="stage"):
        rollout.stage(timeout_s=0.4)
    gate.open.set()
    assert reading.result(10) == 2
    assert equal(copied, weights(5))
    assert rollout.stage().install() == 3


def test_sources_of_another_layout_may_be_refused_before_a_byte_is_fetched(here: Hub) -> None:
    trainer = here.connect()
    trainer.register({"w": np.ones((40, 50), np.float32)})
    trainer.publish(1)
    rollout, half = here.connect("rollout"), np.zeros((20, 50), np.float32)
    rollout.register({"w": half}, boxes={"w": [Box("w", (0, 0), (20, 50), (0, 0))]})

    def refuse(layouts: object) -> None:
        raise LayoutMismatch("not these")

    with pytest.raises(LayoutMismatch, match="not these"):
        rollout.stage(check=refuse)
    assert rollout.stage().install() == 1
    assert (half == 1).all()
