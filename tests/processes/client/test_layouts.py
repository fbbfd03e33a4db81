"""Engines of one layout behind a trainer of another: one reshards, the others copy what it holds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tensorhub_core import Box, CorruptTransfer, VersionConflict, Worker
from tests.processes.client.conftest import Hub
from tests.processes.client.test_faults import in_background
from tests.processes.client.test_shards import Arrays, part, shards, together, whole, zeros

pytestmark = pytest.mark.timeout(120)
TRAINER_SHARDS = 4
Engine = list[tuple[Worker, Arrays]]


class Heard:
    """Who the bytes of each shard came from; `hold` stops the reads after some of them."""

    def __init__(self, hold: bool = False) -> None:
        self.sources: set[str] = set()
        self.half, self.go = threading.Event(), threading.Event()
        self._hold = hold

    def __call__(self, done_bytes: int, total_bytes: int, source: str) -> None:
        self.sources.add(source)
        if self._hold:
            self.half.set()
            assert self.go.wait(60)


def train(here: Hub, version: int, trainer: Engine | None = None) -> Engine:
    """Publish a version, in place if the trainer is there already."""
    made = shards(here, "trainer", whole(version), TRAINER_SHARDS) if trainer is None else trainer
    for shard, (worker, arrays) in enumerate(made):
        if trainer is not None:
            worker.unpublish()
            for name, array in part(whole(version), shard, TRAINER_SHARDS)[0].items():
                arrays[name][...] = array
    for worker, _ in made:
        worker.publish(version)
    return made


def fill(engine: Engine, heard: Heard, method: str = "replicate") -> list[Any]:
    return together([lambda w=w: getattr(w, method)(progress=heard, timeout_s=60) for w, _ in engine])  # type: ignore[misc]


def holds(engine: Engine, version: int) -> bool:
    for shard, (_, arrays) in enumerate(engine):
        for name, array in (
            part(whole(version), shard, len(engine))[0].items() if len(engine) > 1 else whole(version).items()
        ):
            rows = slice(-1) if name == "tp.up" else slice(None)  # the padding row
            if not np.array_equal(arrays[name][rows], array[rows]):
                return False
    return True


def read_bytes(engine: Engine) -> int:
    return sum(worker.counters.bytes_read for worker, _ in engine)


def digests(engine: Engine) -> Sequence[bytes | None]:
    return [worker.digest for worker, _ in engine]


@pytest.mark.parametrize("count", [1, 2])
def test_who_comes_after_the_first_of_its_layout_reads_nothing_from_the_trainer(here: Hub, count: int) -> None:
    trainer = train(here, 1)
    first, second = (shards(here, name, zeros(), count) for name in ("first", "second"))
    heard = Heard()
    assert fill(first, heard) == [1] * count
    assert heard.sources == {"trainer"}
    for version in (1, 2, 3):
        if version > 1:
            train(here, version, trainer)
            assert fill(first, heard, "update") == [version] * count
        heard, before = Heard(), read_bytes(second)
        assert fill(second, heard, "update") == [version] * count
        assert heard.sources == {"first"}, "whole, and equal bytes: no resharding"
        own = sum(array.nbytes for _, arrays in second for array in arrays.values())
        assert read_bytes(second) - before == own, "every byte of its own memory as it is, none twice"
        assert holds(second, version)
        assert digests(second) == digests(first)


def test_many_that_come_later_make_a_chain_that_the_trainer_is_not_in(here: Hub) -> None:
    train(here, 1)
    first = shards(here, "first", zeros(), 2)
    fill(first, Heard())
    others = [shards(here, f"other {number}", zeros(), 2) for number in range(4)]
    heard = [Heard() for _ in others]
    together([lambda e=engine, h=each: fill(e, h) for engine, each in zip(others, heard, strict=True)])  # type: ignore[misc]
    assert "trainer" not in set[str]().union(*(each.sources for each in heard))
    assert all(holds(engine, 1) for engine in others)


def test_nobody_waits_for_the_first_one_that_still_reshards(here: Hub) -> None:
    """It is followed as far as it comes; when it does not come on, the trainer is read instead."""
    train(here, 1)
    first, second = (shards(here, name, zeros(), 2) for name in ("first", "second"))
    slow, heard = Heard(hold=True), Heard()
    filling = in_background(lambda: fill(first, slow))
    assert slow.half.wait(30)
    assert fill(second, heard) == [1, 1]
    assert "trainer" in heard.sources
    assert not slow.go.is_set()
    assert holds(second, 1)
    slow.go.set()
    assert filling.result(60) == [1, 1]
    assert holds(first, 1)
    assert digests(first) == digests(second), "each derived the same checksums from verified bytes"
    third, heard = shards(here, "third", zeros(), 2), Heard()
    fill(third, heard)
    assert heard.sources <= {"first", "second"}
    assert holds(third, 1)


def test_replicas_whose_padding_differs_are_told_so(here: Hub) -> None:
    """It is part of what equal layouts copy and compare, but nobody fills it from another layout."""
    ((trainer, _),) = shards(here, "trainer", {"w": np.ones((4, 64), np.float32)}, 1)
    trainer.publish(1)
    readers = []
    for padding in (0, 0, 7, 7):
        worker, mine = here.worker(f"reader {len(readers)}"), np.full((6, 64), padding, np.float32)
        worker.register({"padded": mine}, {"padded": [Box("w", (0, 0), (4, 64), (1, 0))]})
        readers.append(worker)
    assert readers[3].replicate(publish=False) == 1, "nobody has said yet what the padding is"
    for worker in readers[:2]:
        assert worker.replicate() == 1
        worker.unpublish()  # so that the next one is not filled from it, padding and all
    with pytest.raises(CorruptTransfer, match="padding"):
        readers[2].replicate()
    with pytest.raises(VersionConflict, match="padding"):
        readers[3].publish(1)
