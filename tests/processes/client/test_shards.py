"""Replicas of several shards, and readers of another layout than their source's: numpy slicing says what is right."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tensorhub_core import Box, LayoutMismatch, StateError, VersionUnavailable, Worker
from tensorhub_core.client.oneshot import ask
from tensorhub_core.state.messages import GetStatus, StatusReply
from tests.processes.client.actor import Actor
from tests.processes.client.conftest import Hub, nothing_retained
from tests.processes.client.retaining import until

pytestmark = pytest.mark.timeout(120)
ROWS, COLUMNS = 512, 768
Arrays = dict[str, NDArray[Any]]


def whole(seed: int) -> Arrays:
    """The logical tensors: `up` is cut by rows, `down` by columns, `norm` is on every shard."""
    rng = np.random.default_rng(seed)
    return {
        "up": rng.random((ROWS, COLUMNS), np.float32),
        "down": rng.random((COLUMNS, ROWS)).astype(np.float16),
        "norm": rng.random(COLUMNS, np.float32),
    }


def part(tensors: Arrays, shard: int, count: int) -> tuple[Arrays, dict[str, list[Box]]]:
    """Cut one shard out, with a name and a padding row of its own, and say by boxes what it holds."""
    rows = ROWS // count
    mine = slice(shard * rows, (shard + 1) * rows)
    up = np.full((rows + 1, COLUMNS), -1, np.float32)
    up[:rows] = tensors["up"][mine]
    arrays = {"tp.up": up, "tp.down": tensors["down"][:, mine].copy(), "norm": tensors["norm"].copy()}
    boxes = {
        "tp.up": [Box("up", (mine.start, 0), (rows, COLUMNS), (0, 0))],
        "tp.down": [Box("down", (0, mine.start), (COLUMNS, rows), (0, 0))],
    }
    return arrays, boxes


def shards(here: Hub, replica: str, tensors: Arrays, count: int) -> list[tuple[Worker, Arrays]]:
    """Connect and register every shard of a replica."""
    made = []
    for shard in range(count):
        worker = here.worker(replica, shard=shard, num_shards=count, settings={"segment_bytes": 64 << 10})
        arrays, boxes = part(tensors, shard, count) if count > 1 else ({n: a.copy() for n, a in tensors.items()}, {})
        worker.register(arrays, boxes)
        made.append((worker, arrays))
    return made


def states(here: Hub, replica: str) -> list[str]:
    """Return what the server says of a replica's shards."""
    reply = ask(here.server.address, GetStatus(here.model))
    assert isinstance(reply, StatusReply)
    found = [row.shards for row in reply.models[0].replicas if row.replica == replica]
    return [shard.state for shard in found[0]]


def together(calls: list[Any]) -> list[Any]:
    """Make calls at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in calls]]


def zeros() -> Arrays:
    return {name: np.zeros_like(array) for name, array in whole(0).items()}


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2), (1, 4)])
def test_any_number_of_shards_is_read_by_any_other(here: Hub, source: int, target: int) -> None:
    for worker, _ in shards(here, "trainer", whole(1), source):
        worker.publish(1)
    readers = shards(here, "reader", zeros(), target)
    assert together([worker.replicate for worker, _ in readers]) == [1] * target
    for shard, (_, arrays) in enumerate(readers):
        expected = part(whole(1), shard, target)[0] if target > 1 else whole(1)
        for name, array in expected.items():
            got = arrays[name]
            if name == "tp.up" and source != target:
                assert (got[-1] == -1).all(), "padding is never written"
                got, array = got[:-1], array[:-1]
            assert np.array_equal(got, array), name


def test_a_reader_of_another_layout_serves_its_own_layout_and_others(here: Hub) -> None:
    trainers = shards(here, "trainer", whole(1), 1)
    trainers[0][0].publish(1)
    first = shards(here, "first", zeros(), 2)
    together([worker.replicate for worker, _ in first])
    trainers[0][0].unpublish()
    second = shards(here, "second", zeros(), 2)
    assert together([worker.replicate for worker, _ in second]) == [1, 1]
    third = shards(here, "third", zeros(), 1)
    assert third[0][0].replicate() == 1
    for name, array in whole(1).items():
        assert np.array_equal(third[0][1][name], array)


@nothing_retained
def test_a_version_is_visible_only_when_all_its_shards_are_published(here: Hub) -> None:
    trainers = shards(here, "trainer", whole(1), 2)
    trainers[0][0].publish(1)
    (reader, arrays), *_ = shards(here, "reader", zeros(), 1)
    assert not any(info.whole for info in reader.versions())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.replicate)
        trainers[1][0].publish(1)
        assert waiting.result(30) == 1
    assert np.array_equal(arrays["down"], whole(1)["down"])
    trainers[0][0].unpublish()
    late, untouched = shards(here, "late", zeros(), 1)[0]
    reader.unpublish()
    with pytest.raises(VersionUnavailable):
        late.replicate(1)
    assert not untouched["up"].any()


def test_a_layout_that_one_shard_cannot_fill_ends_the_round_for_all(here: Hub) -> None:
    shards(here, "trainer", whole(1), 1)[0][0].publish(1)
    good, bad = (here.worker("reader", shard=shard, num_shards=2) for shard in (0, 1))
    arrays, boxes = part(zeros(), 0, 2)
    good.register(arrays, boxes)
    wrong = {"no.such": np.full((4, 4), 7, np.float32)}
    bad.register(wrong, {"no.such": [Box("nothing", (0, 0), (4, 4), (0, 0))]})
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(good.replicate)
        with pytest.raises(LayoutMismatch, match="nothing"):
            bad.replicate()
        with pytest.raises((LayoutMismatch, StateError)):
            other.result(30)
    assert (wrong["no.such"] == 7).all()
    assert good.version is None
    assert bad.version is None


def test_a_dead_shard_ends_the_round_of_the_others_and_a_new_one_can_take_part(here: Hub) -> None:
    for worker, _ in shards(here, "trainer", whole(1), 2):
        worker.publish(1)
    arrays, boxes = part(zeros(), 0, 2)
    living = here.worker("reader", shard=0, num_shards=2)
    living.register(arrays, boxes)
    with Actor() as actor, ThreadPoolExecutor(1) as pool:
        settings = {"server": here.server.address, "model": here.model, "replica": "reader"}
        actor.do("connect", "dead", shard=1, num_shards=2, **settings)
        waiting = pool.submit(living.replicate, timeout_s=20)
        actor.kill()
        again, more_boxes = part(zeros(), 1, 2)
        heir = here.worker("reader", shard=1, num_shards=2)
        with pytest.raises(StateError, match="shard 1"):
            waiting.result(30)
        heir.register(again, more_boxes)
        assert together([living.replicate, heir.replicate]) == [1, 1]
    assert np.array_equal(arrays["tp.down"], part(whole(1), 0, 2)[0]["tp.down"])
    assert np.array_equal(again["tp.down"], part(whole(1), 1, 2)[0]["tp.down"])


@nothing_retained
def test_a_shard_that_waits_follows_the_others_of_its_replica_to_a_version_that_is_taken_back(here: Hub) -> None:
    """Each shard in a loop of its own, `wait` and then `update`, of which one is a little late."""
    (trainer, arrays), *_ = shards(here, "trainer", whole(1), 1)
    trainer.publish(1)
    engine = shards(here, "engine", zeros(), 2)
    assert together([worker.replicate for worker, _ in engine]) == [1, 1]
    trainer.unpublish()
    for name, array in whole(2).items():
        arrays[name][...] = array
    trainer.publish(2)
    begun = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(engine[0][0].update, progress=lambda done, total, source: begun.set())
        assert begun.wait(20)
        taken_back = pool.submit(trainer.unpublish)
        until(lambda: "draining" in states(here, "trainer"))
        assert engine[1][0].wait(newer_than=1, timeout_s=20) == 2
        assert engine[1][0].update() == early.result(20) == 2
        taken_back.result(20)
    for shard, (_, got) in enumerate(engine):
        assert np.array_equal(got["tp.down"], part(whole(2), shard, 2)[0]["tp.down"])
