"""Install of what a worker has staged: shards together, broken off, after a restart, into odd memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.client import installing
from tensorhub_core.client.installing import LocalCopy
from tensorhub_core.errors import (
    DeadlineExceeded,
    StateError,
)
from tensorhub_core.layout.types import Box
from tensorhub_core.server.serving import serve
from tests.unit.client.hubs import (
    Hub,
    SecondGate,
    equal,
    holder,
    hub,
    in_background,
    reader,
    weights,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Hub]:
    with hub(**getattr(request, "param", {})) as made:
        yield made


def shards(here: Hub, replica: str, **more: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    workers, memories = [], []
    for shard in (0, 1):
        worker = here.connect(replica, shard=shard, num_shards=2, **more)
        memory = {f"w{shard}": np.zeros(5000)}
        worker.register(memory)
        workers.append(worker)
        memories.append(memory)
    return workers, memories


def both(calls: list[Any]) -> list[Any]:
    return [future.result(20) for future in [in_background(call) for call in calls]]


def two_shards(here: Hub) -> tuple[list[Any], list[Any], list[dict[str, Any]]]:
    """Return two trainer shards, and two reader shards which hold version 1 while version 2 is published."""
    trainers, memories = shards(here, "trainer")
    readers, tensors = shards(here, "rollout")
    for version in (1, 2):
        for shard, trainer in enumerate(trainers):
            trainer.unpublish()
            memories[shard][f"w{shard}"][:] = 10 * version + shard
            trainer.publish(version)
        if version == 1:
            assert both([worker.replicate for worker in readers]) == [1, 1]
    return trainers, readers, tensors


def test_shards_stage_and_install_together(here: Hub) -> None:
    _trainers, readers, tensors = two_shards(here)
    staged = both([worker.stage for worker in readers])
    first = in_background(staged[0].install)
    time.sleep(0.2)
    assert not first.done(), "the other shard may not have staged it"
    assert (tensors[0]["w0"] == 10).all()
    assert staged[1].install() == 2
    assert first.result(10) == 2
    assert [set(tensors[k][f"w{k}"]) for k in (0, 1)] == [{20.0}, {21.0}]
    assert set(readers[0].versions()[-1].replicas) == {"trainer", "rollout"}


def test_nobody_installs_after_a_shard_has_gone(here: Hub) -> None:
    _trainers, readers, tensors = two_shards(here)
    staged = both([worker.stage for worker in readers])
    readers[1].close()
    with pytest.raises(DeadlineExceeded):
        staged[0].install(timeout_s=0.5)
    assert (tensors[0]["w0"] == 10).all()
    assert readers[0].version == 1
    staged[0].discard()


def test_a_shard_that_goes_while_another_waits_to_install_ends_it_at_once(here: Hub) -> None:
    _trainers, readers, tensors = two_shards(here)
    staged = both([worker.stage for worker in readers])
    first = in_background(staged[0].install)
    time.sleep(0.2)
    readers[1].close()
    with pytest.raises(StateError, match="gone"):
        first.result(10)
    assert (tensors[0]["w0"] == 10).all()
    assert readers[0].version == 1


def test_shards_with_different_staged_versions_are_told(here: Hub) -> None:
    trainers, readers, _tensors = two_shards(here)
    staged = both([worker.stage for worker in readers])
    staged[1].discard()
    for trainer in trainers:
        trainer.unpublish()
        trainer.publish(3)
    alone = in_background(lambda: readers[1].stage(timeout_s=5))
    time.sleep(0.2)
    with pytest.raises(StateError, match="different things"):
        staged[0].install(timeout_s=5)
    with pytest.raises(StateError, match="different things"):
        alone.result(10)


def stopped_copy(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Let a local copy write its first bytes and then hang until it is stopped, or fail."""

    def fill(copy: LocalCopy) -> None:
        copy._copies.memory.buffers[0][:100] = 0
        if error is not None:
            raise error
        while not copy._cancelled:
            time.sleep(0.01)

    monkeypatch.setattr(LocalCopy, "_fill_devices", fill)


@pytest.mark.parametrize("here", [{"retain": 0}], indirect=True, ids=["retaining nothing"])
@pytest.mark.parametrize("error", [None, OSError("no device")], ids=["deadline", "error"])
def test_an_install_that_is_broken_off_leaves_the_memory_dirty_and_the_version_staged(
    here: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    _trainer, rollout, tensors = holder(here)
    staged = rollout.stage()
    with monkeypatch.context() as patch:
        stopped_copy(patch, error)
        with pytest.raises(DeadlineExceeded if error is None else OSError):
            staged.install(timeout_s=0.5)
    assert rollout.version is None
    with pytest.raises(StateError, match="dirty"):
        rollout.publish(1)
    assert [v.replicas for v in rollout.versions()] == [("rollout", "trainer")], "what is staged still serves"
    assert staged.install() == 2
    assert equal(tensors, weights(5))
    assert rollout.version == 2


def test_an_interrupted_install_writes_nothing_afterwards(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "CHUNK_BYTES", 4096)
    _trainer, rollout, tensors = holder(here)
    staged = rollout.stage()
    stopped_copy(monkeypatch)
    with pytest.raises(DeadlineExceeded):
        staged.install(timeout_s=0.3)
    then = {name: array.copy() for name, array in tensors.items()}
    time.sleep(0.2)
    assert equal(tensors, then)


def restart(here: Hub) -> None:
    address = here.server.address
    here.server.close()
    here.server = serve(address, lease_s=1.0, heartbeat_s=0.1)


def test_a_server_that_restarts_between_stage_and_install_changes_nothing(here: Hub) -> None:
    _trainer, rollout, tensors = holder(here)
    staged = rollout.stage()
    restart(here)
    assert staged.install(timeout_s=15) == 2
    assert equal(tensors, weights(5))
    other, copied = reader(here, "other")
    assert other.replicate(timeout_s=15) == 2
    assert equal(copied, weights(5))
    here.server.close()


def test_a_stage_goes_on_while_the_server_restarts(here: Hub) -> None:
    gate = SecondGate(3)
    _trainer, rollout, tensors = holder(here, executor=gate.executor)
    staging = in_background(lambda: rollout.stage(timeout_s=20))
    assert gate.reached.wait(10)
    restart(here)
    time.sleep(0.5)
    gate.open.set()
    staged = staging.result(25)
    read = [index for job in gate.executor.jobs[1:] for index in job.read]
    assert len(read) == len(set(read)), "nothing is read twice"
    assert equal(tensors, weights())
    assert staged.install(timeout_s=15) == 2
    assert equal(tensors, weights(5))
    here.server.close()


def test_strided_and_tied_tensors_are_installed_where_the_user_sees_them(here: Hub) -> None:
    def make(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        fused = torch.rand(64, 96, generator=generator)
        tied = torch.rand(50, 40, generator=generator)
        return {"q": fused[:, :32], "k": fused[:, 32:], "t": tied.t(), "head": tied.t(), "empty": torch.empty(0, 3)}

    trainer, rollout = here.connect(), here.connect("rollout")
    source, tensors = make(1), make(2)
    trainer.register(source)
    trainer.publish(1)
    rollout.register(tensors)
    rollout.stage().install()
    assert all(torch.equal(tensors[name], source[name]) for name in source)
    other, copied = here.connect("other"), make(3)
    other.register(copied)
    trainer.unpublish()
    other.replicate()
    assert all(torch.equal(copied[name], source[name]) for name in source), "its shadows serve the new version"


def test_bytes_outside_of_the_boxes_survive_an_install_from_another_layout(here: Hub) -> None:
    whole = np.arange(400, dtype=np.float32).reshape(20, 20)
    trainer = here.connect()
    trainer.register({"w": whole})
    trainer.publish(1)
    padded = np.full((24, 20), -1.0, np.float32)
    rollout = here.connect("rollout")
    rollout.register({"p": padded}, boxes={"p": [Box("w", (0, 0), (20, 20), (0, 0))]})
    rollout.replicate(publish=False)
    padded[20:] = 7.0
    rollout.register({"p": padded}, boxes={"p": [Box("w", (0, 0), (20, 20), (0, 0))]})
    trainer.unpublish()
    whole += 1
    trainer.publish(2)
    with rollout.stage() as staged:
        assert staged.install() == 2
    assert (padded[:20] == whole).all()
    assert (padded[20:] == 7.0).all()
    twin, copied = here.connect("twin"), np.zeros((24, 20), np.float32)
    twin.register({"p": copied}, boxes={"p": [Box("w", (0, 0), (20, 20), (0, 0))]})
    trainer.unpublish()
    twin.replicate()
    assert (copied == padded).all(), "its checksums are those of what it holds"
