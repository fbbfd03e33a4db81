"""Many readers follow a trainer that never waits: whatever they hold is one whole version, bit by bit."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tensorhub_core import Box, VersionUnavailable, Worker
from tests.processes.client.conftest import Hub

pytestmark = pytest.mark.timeout(180)
LAST, ROWS, COLUMNS = 25, 1024, 512
SETTINGS = {"segment_bytes": 16 << 10, "call_timeout_s": 60}
Arrays = dict[str, NDArray[np.float32]]


def replica(here: Hub, name: str, count: int) -> list[tuple[Worker, Arrays]]:
    """Connect the shards of a replica, each with its rows of every tensor."""
    made = []
    rows = ROWS // count
    for shard in range(count):
        worker = here.worker(name, shard=shard, num_shards=count, settings=SETTINGS)
        arrays = {f"t{i}": np.zeros((rows, COLUMNS), np.float32) for i in range(5)}
        boxes = {each: [Box(each, (shard * rows, 0), (rows, COLUMNS), (0, 0))] for each in arrays}
        worker.register(arrays, boxes if count > 1 else None)
        made.append((worker, arrays))
    return made


def follow(shards: list[tuple[Worker, Arrays]], seed: int, done: threading.Event) -> tuple[int, int]:
    """Update to every version that can be had; return how many there were, and how many were gone already."""
    rng, held, got, gone = random.Random(seed), None, 0, 0
    with ThreadPoolExecutor(len(shards)) as pool:
        while held is None or held < LAST:
            held = shards[0][0].wait(newer_than=held)
            offer = rng.random() < 0.8
            calls: list[Any] = [pool.submit(worker.update, publish=offer) for worker, _ in shards]
            outcomes = [call.exception(90) or call.result() for call in calls]
            if any(isinstance(outcome, Exception) for outcome in outcomes):
                assert all(isinstance(outcome, VersionUnavailable) for outcome in outcomes), outcomes
                gone += 1
                continue
            assert len(set(outcomes)) == 1, "shards of one replica hold one version"
            held, got = outcomes[0], got + 1
            for _, arrays in shards:
                for array in arrays.values():
                    assert np.unique(array.view(np.uint8)).tolist() == [held], "a mix of versions"
    done.wait(120)  # others may still read from this replica
    return got, gone


def test_followers_of_any_layout_hold_whole_versions_only(here: Hub) -> None:
    trainer = replica(here, "trainer", 2)
    followers = [replica(here, f"follower {number}", count) for number, count in enumerate((1, 2, 1, 2))]
    done = threading.Event()
    with ThreadPoolExecutor(len(followers)) as pool:
        following = [pool.submit(follow, shards, number, done) for number, shards in enumerate(followers)]
        try:
            for version in range(LAST + 1):
                for worker, _ in trainer:
                    worker.unpublish()
                for worker, arrays in trainer:
                    for array in arrays.values():
                        array.view(np.uint8)[...] = version
                    worker.publish(version)
                time.sleep(0.03)
            end = time.monotonic() + 90
            while not all(worker.version == LAST for shards in followers for worker, _ in shards):
                broken = [each.exception() for each in following if each.done() and each.exception()]
                assert not broken, broken
                assert time.monotonic() < end, "a follower does not arrive"
                time.sleep(0.05)
        finally:
            done.set()
        figures = [each.result(120) for each in following]
    assert all(got >= 1 for got, _ in figures), figures
