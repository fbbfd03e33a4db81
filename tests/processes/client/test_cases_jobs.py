"""Trainers that come again, and jobs that meet under one model's name: readers never move to other numbers unsaid."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tensorhub_core import DeadlineExceeded, LayoutMismatch, StateError, VersionConflict, VersionUnavailable, Worker
from tensorhub_core.cli.status import fetch
from tests.processes.client.actor import Actor, RemoteError
from tests.processes.client.conftest import QUICK, Hub
from tests.processes.client.samples import blank, digest, make
from tests.processes.client.test_shards import shards, together, whole, zeros

pytestmark = pytest.mark.timeout(120)


def start(here: Hub, actor: Actor, shard: int = 0, count: int = 1, **more: Any) -> str:
    """Connect and register a trainer's shard in another process; return its handle."""
    handle = f"{here.model} {shard}"
    about = {"server": here.server.address, "model": here.model, "replica": "trainer", "settings": QUICK}
    actor.do("connect", handle, shard=shard, num_shards=count, **about, **more)
    actor.do("register", handle, sample="plain", seed=shard)
    return handle


def publish(actor: Actor, handle: str, version: int) -> Any:
    return actor.do("call", handle, method="publish", version=version)


@pytest.mark.parametrize("stream", [None, "run-1"])
def test_a_trainer_that_starts_over_needs_a_new_stream(here: Hub, stream: str | None) -> None:
    reader, tensors = here.reader("plain")
    with Actor() as first:
        publish(first, start(here, first, stream=stream), 10)
        old = reader.replicate()
        first.kill()
    ten = digest(tensors)
    with Actor() as again:
        handle = start(here, again, stream=stream)
        again.do("fill", handle, value=7)
        for number in (2, 9):
            with pytest.raises(RemoteError, match=r"VersionConflict.*stream"):
                publish(again, handle, number)
        with pytest.raises(DeadlineExceeded):
            reader.wait(newer_than=old, timeout_s=0.5)
        assert reader.update(timeout_s=20) == 10
        assert digest(tensors) == ten
        again.kill()
    with Actor() as over:
        handle = start(here, over, stream="run-2")
        over.do("fill", handle, value=7)
        publish(over, handle, 2)
        new = reader.wait(newer_than=old, timeout_s=20)
        assert (int(new), new.epoch) == (2, old.epoch + 1), "who follows is told that numbers begin anew"
        assert reader.update(timeout_s=20) == 2
        assert digest(tensors) == over.do("digest", handle)


@pytest.mark.parametrize("count", [1, 2])
def test_what_a_dead_process_held_is_gone_as_soon_as_its_place_is_taken(here: Hub, count: int) -> None:
    """The newcomer's hello ends the old copies at once; nobody waits for a lease."""
    onlooker = here.worker("onlooker", settings={"call_timeout_s": 40})
    onlooker.register(blank(make("plain", 0)))
    with Actor() as living, Actor() as dying, Actor() as heir:
        places = [(living, k) for k in range(count - 1)] + [(dying, count - 1)]
        for actor, k in places:
            publish(actor, start(here, actor, k, count), 1)
        assert [info.replicas for info in onlooker.versions() if info.whole] == [("trainer",)]
        dying.kill()
        handle = start(here, heir, count - 1, count)
        assert not any(info.whole for info in onlooker.versions())
        (model,) = fetch(here.server.address, here.model, 10.0).models
        (row,) = [replica for replica in model.replicas if replica.replica == "trainer"]
        assert [shard.state for shard in row.shards] == ["published"] * (count - 1) + ["idle"]
        with pytest.raises(VersionUnavailable):
            onlooker.replicate(1, timeout_s=30)
        publish(heir, handle, 1)
        assert [info.replicas for info in onlooker.versions() if info.whole] == [("trainer",)]


def test_half_a_version_is_waited_for_and_then_the_deadline_names_who_has_it(here: Hub) -> None:
    for worker, _ in shards(here, "old", whole(8), 2):
        worker.publish(8)
    (follower, arrays), *_ = shards(here, "follower", zeros(), 1)
    assert follower.replicate() == 8
    new = shards(here, "new", whole(9), 2)
    new[0][0].publish(9)
    with pytest.raises(DeadlineExceeded):
        follower.wait(newer_than=8, timeout_s=0.5)
    assert follower.update() == 8
    readers = shards(here, "reader", zeros(), 2)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(worker.replicate, 9, timeout_s=1.5) for worker, _ in readers]
        errors = [future.exception(30) for future in asked]
    assert all(isinstance(error, DeadlineExceeded) for error in errors), errors
    assert any("version 9 at new/0" in str(error) for error in errors), errors
    assert not any(array.any() for _, mine in readers for name, array in mine.items() if name == "tp.down")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(together, [lambda w=worker: w.replicate(9, timeout_s=30) for worker, _ in readers])
        new[1][0].publish(9)
        assert waiting.result(40) == [9, 9]
    assert follower.update(timeout_s=30) == 9
    assert np.array_equal(arrays["down"], whole(9)["down"])


def job(here: Hub, seed: int, replica: str, stream: str | None, columns: int = 64) -> tuple[Worker, Any]:
    """Connect one job's trainer."""
    worker, array = here.worker(replica, stream=stream), np.full((64, columns), seed, np.float32)
    worker.register({"w": array})
    return worker, array


def step(worker: Worker, array: Any, version: int) -> None:
    worker.unpublish(timeout_s=20)
    array += 100
    worker.publish(version)


@pytest.mark.parametrize("streams", [(None, None), ("a", "b"), (None, "b")])
def test_two_jobs_under_one_models_name_are_told(here: Hub, streams: tuple[str | None, str | None]) -> None:
    """One of them gets a typed error no later than at its next version; nobody gets a mix."""
    first, one = job(here, 1, "job 1", streams[0])
    first.publish(1)
    second, two = job(here, 2, "job 2", streams[1])
    if streams[1] is None:
        with pytest.raises(VersionConflict, match="stream"):
            second.publish(1)
        step(first, one, 2)
        return
    second.publish(1)
    first.unpublish(timeout_s=20)
    one += 100
    with pytest.raises(VersionConflict, match="'b'"):
        first.publish(2)
    step(second, two, 2)
    reader, copy = job(here, 0, "reader", None)
    got = reader.replicate()
    assert (int(got), (copy == two).all()) == (2, True)


def test_two_jobs_whose_trainers_have_one_name_are_told(here: Hub) -> None:
    first, _ = job(here, 1, "trainer", None)
    first.publish(1)
    second, _ = job(here, 2, "trainer", None)
    with pytest.raises(StateError, match="place"):
        first.unpublish(timeout_s=20)
    with pytest.raises(VersionConflict):
        second.publish(1)


def test_engines_of_one_job_do_not_take_another_model_that_has_its_name(here: Hub) -> None:
    first, _ = job(here, 1, "job 1", None)
    first.publish(1)
    engine, weights = job(here, 0, "engine", None)
    assert engine.replicate() == 1
    second, _ = job(here, 2, "job 2", None, columns=32)
    second.publish(2)
    with pytest.raises(LayoutMismatch, match="w"):
        engine.update(timeout_s=20)
    assert engine.version == 1
    assert (weights == 1).all()
