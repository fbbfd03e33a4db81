"""Versions that pass through memory smaller than they are, against a real server: bounded, one round, never mixed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tensorhub_core import Worker, connect
from tensorhub_core.client.piecewise import Passage
from tensorhub_core.client.piecewise_round import PassingVersion
from tensorhub_core.client.portions import arena_bytes, cut_portions
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    LayoutMismatch,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.types import TensorSpec
from tensorhub_core.transport.memory import MemoryTransport
from tests.unit.client.hubs import in_background
from tests.unit.client.piecewise_world import LIMIT, QUICK, Arrays, Here, Loader, described, passed, weights, world

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here() -> Iterator[Here]:
    with world() as made:
        yield made


def test_portions_are_whole_tensors_that_fit_or_stand_alone() -> None:
    specs = [TensorSpec(name, str(t.dtype), t.shape) for name, t in weights(0).items()]
    whole = build_layout(specs, shard=0, num_shards=1, segment_bytes=4096)
    for limit in (0, 64, 12_000, 20_000, 60_000, 1 << 30):
        portions = cut_portions(whole, limit)
        names = [spec.name for portion in portions for spec in portion.layout.tensors]
        assert names == [spec.name for spec in whole.tensors], "all, once, in canonical order"
        assert all(p.room_bytes <= limit or len(p.layout.tensors) == 1 for p in portions)
        assert sum(p.table.total_bytes for p in portions) == sum(t.nbytes for t in weights(0).values())
        largest = max(portion.room_bytes for portion in portions)
        assert largest <= arena_bytes(portions, limit) <= max(2 * limit, largest)


@pytest.mark.parametrize("limit", [0, LIMIT, 1 << 20])
@pytest.mark.parametrize("source", ["trainer", "halves", "fused"])
def test_all_tensors_pass_with_the_digest_that_a_plain_reader_has(here: Here, source: str, limit: int) -> None:
    tensors = weights(1)
    getattr(here, source)(tensors)
    seen: list[tuple[int, int, str]] = []
    loader, reader = Loader(), here.reader(staging_bytes=limit)
    with reader.passing(described(tensors), "latest", 20.0, lambda *figures: seen.append(figures)) as passing:
        assert passing.begins()
        version, digest = passing.use(loader)
    assert version == 1
    assert loader.has(tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[-1] == (total, total, source)
    assert [figures[0] for figures in seen] == sorted(figures[0] for figures in seen)
    assert reader.versions()[0].replicas == (source,), "offered to nobody"
    with connect(here.server.address, model="policy", transport=MemoryTransport(here.network), settings=QUICK) as other:
        other.register({name: np.zeros_like(tensor) for name, tensor in tensors.items()})
        other.replicate()
        assert other.digest == digest
    assert reader.counters.bytes_read == total, "no byte twice, none for nothing"


def test_memory_is_bounded(here: Here) -> None:
    tensors = weights(1)
    specs = [TensorSpec(*tensor) for tensor in described(tensors)]
    passage = Passage(build_layout(specs, shard=0, num_shards=1, segment_bytes=4096), LIMIT)
    assert sum(region.length_bytes for region in passage.memory.regions()) == tensors["big"].nbytes + 40
    assert passage.memory.total_bytes > 3 * LIMIT


def test_sources_stay_leased_until_all_of_it_came(here: Here) -> None:
    """The trainer's next step waits: else a version that takes longer than a step would never come whole."""
    tensors = weights(1)
    trainer = here.trainer(tensors)
    stopping: list[Any] = []

    def before(name: str) -> None:
        if name == "layer.3.weight":
            stopping.append(in_background(trainer.unpublish))
            time.sleep(0.3)
        assert not any(each.done() for each in stopping)

    loader = Loader(before)
    assert passed(here.reader(), tensors, loader)[0] == 1
    assert loader.has(tensors)
    stopping[0].result(10)


def test_all_shards_get_one_version_or_none(here: Here) -> None:
    tensors = weights(1)
    trainer = here.trainer(tensors)
    both = [here.reader(shard, 2) for shard in range(2)]
    slow = threading.Event()
    loaders = [Loader(), Loader(lambda name: slow.wait(10) and None)]
    futures = [
        in_background(lambda r=reader, u=loader: passed(r, tensors, u))  # type: ignore[misc]
        for reader, loader in zip(both, loaders, strict=True)
    ]
    while len(loaders[0].got) < len(tensors):
        time.sleep(0.01)
    time.sleep(0.2)
    assert not futures[0].done(), "a shard that has used all of it waits for the others"
    slow.set()
    assert futures[0].result(10) == futures[1].result(10)
    assert all(loader.has(tensors) for loader in loaders)

    trainer.unpublish()
    trainer.publish(2)
    broken = Loader(_fail_at("layer.5.weight"))
    futures = [
        in_background(lambda r=reader, u=loader: passed(r, tensors, u))  # type: ignore[misc]
        for reader, loader in zip(both, (Loader(), broken), strict=True)
    ]
    with pytest.raises(RuntimeError, match="no kernel"):
        futures[1].result(10)
    with pytest.raises(TensorHubError, match="no kernel"):
        futures[0].result(10)
    again = [in_background(lambda r=reader: passed(r, tensors, Loader())) for reader in both]  # type: ignore[misc]
    assert [future.result(10)[0] for future in again] == [2, 2]


def _fail_at(where: str) -> Callable[[str], None]:
    def before(name: str) -> None:
        if name == where:
            raise RuntimeError("no kernel for this")

    return before


def test_a_source_that_dies_half_way_is_replaced_by_its_like(here: Here) -> None:
    tensors = weights(1)
    one, other = here.trainer(tensors, replica="one"), here.trainer(tensors, replica="two")
    dead: list[str] = []

    def before(name: str) -> None:
        if name == "layer.2.weight" and not dead:
            dead.append(name)
            _kill(one)

    loader = Loader(before)
    assert passed(here.reader(), tensors, loader)[0] == 1
    assert loader.has(tensors)
    assert loader.calls == 1, "what came from one source goes on from the other"
    assert other.version == 1


def test_a_source_in_another_layout_means_to_start_over(here: Here) -> None:
    """Their bytes cannot be compared: nothing that came from one of them is mixed with what came from the other."""
    tensors = weights(1)
    one = here.trainer(tensors)
    states: list[int] = []

    def before(name: str) -> None:
        if name == "layer.2.weight" and not states:
            states.append(1)
            here.halves({name: tensor.copy() for name, tensor in tensors.items()})
            _kill(one)

    loader = Loader(before)
    assert passed(here.reader(), tensors, loader)[0] == 1
    assert loader.calls == 2
    assert loader.has(tensors)


def _kill(worker: Worker) -> None:
    """End a worker as a crash does: its memory is gone and the server hears nothing."""
    worker._resources.transport.revoke()
    worker._session.close()


def test_a_version_that_is_lost_half_way_breaks_the_round(here: Here) -> None:
    tensors = weights(1)
    trainer = here.trainer(tensors)

    def before(name: str) -> None:
        if name == "layer.2.weight":
            _kill(trainer)

    loader, reader = Loader(before), here.reader()
    with pytest.raises(VersionUnavailable):
        passed(reader, tensors, loader)
    assert len(loader.got) < len(tensors)
    here.trainer(weights(2), 2, replica="again")
    loader = Loader()
    assert passed(reader, tensors, loader)[0] == 2, "the reader is as good as new"
    assert loader.has(weights(2))


def test_wrong_bytes_do_not_pass(here: Here) -> None:
    tensors = weights(1)
    here.trainer(tensors)
    tensors["layer.6.weight"].view(np.uint32)[7, 7] ^= 1
    loader = Loader()
    with pytest.raises((CorruptTransfer, VersionUnavailable)):
        passed(here.reader(), tensors, loader)
    assert "layer.6.weight" not in loader.got


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"extra": np.zeros(3)}, "extra"),
        ({"bias": None}, "missing"),
        ({"big": np.zeros((10, 125), np.float32)}, "shape"),
        ({"bias": np.zeros(7, np.float32)}, "dtype"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_passes(here: Here, change: Arrays, word: str) -> None:
    tensors = {name: t for name, t in {**weights(1), **change}.items() if t is not None}
    here.trainer(tensors)
    with here.reader().passing(described(weights(1)), 1, 10.0) as passing, pytest.raises(LayoutMismatch) as caught:
        passing.begins()
    assert any(word in line for line in caught.value.differences)


def test_loaders_may_behave_oddly(here: Here) -> None:
    tensors = weights(1)
    here.trainer(tensors)
    reader, names = here.reader(), []

    def stops_early(stream: Iterator[RawTensor]) -> None:
        names.append(next(stream).name)

    with reader.passing(described(tensors), 1, 10.0) as passing:
        assert passing.begins()
        assert passing.use(stops_early)[0] == 1
    with reader.passing(described(tensors), 1, 10.0) as passing:
        assert passing.begins(), "and then the caller leaves"
    with pytest.raises(ZeroDivisionError), reader.passing(described(tensors), 1, 10.0) as passing:
        raise ZeroDivisionError(passing.begins())
    loader = Loader()
    assert passed(reader, tensors, loader)[0] == 1
    assert loader.has(tensors)


def test_an_error_that_the_loader_swallows_is_raised_all_the_same(here: Here) -> None:
    tensors = weights(1)
    trainer = here.trainer(tensors)

    def swallows(stream: Iterator[RawTensor]) -> None:
        next(stream)
        _kill(trainer)
        with contextlib.suppress(Exception):
            list(stream)

    with here.reader().passing(described(tensors), 1, 10.0) as passing:
        assert passing.begins()
        with pytest.raises(VersionUnavailable):
            passing.use(swallows)


def test_nothing_passes_where_all_have_the_version(here: Here) -> None:
    tensors = weights(1)
    here.trainer(tensors)
    reader = here.reader()
    with reader.passing(described(tensors), "latest", 10.0, have=(1, 1)) as passing:
        assert not passing.begins()
    assert reader.counters.bytes_read == 0
    with reader.passing(described(tensors), 7, 0.3) as passing, pytest.raises(DeadlineExceeded):
        passing.begins()


def test_a_use_that_hangs_ends_with_the_deadline(here: Here) -> None:
    tensors = weights(1)
    here.trainer(tensors)
    loader = Loader(lambda name: time.sleep(1.0) if name == "layer.1.weight" else None)
    with here.reader().passing(described(tensors), 1, 0.6) as passing:
        assert passing.begins()
        with pytest.raises(DeadlineExceeded):
            passing.use(loader)


def test_a_passing_version_cannot_be_used_after_its_block(here: Here) -> None:
    tensors = weights(1)
    here.trainer(tensors)
    with here.reader().passing(described(tensors), 1, 10.0) as passing:
        assert isinstance(passing, PassingVersion)
    with pytest.raises(StateError):
        passing.use(Loader())
