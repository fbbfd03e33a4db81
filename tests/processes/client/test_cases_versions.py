"""Publishing twice and elsewhere, memory that moves under a version, and deadlines that are no deadlines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core import (
    Box,
    ConfigError,
    CorruptTransfer,
    DeadlineExceeded,
    LayoutMismatch,
    RegistrationError,
    VersionConflict,
)
from tests.processes.client.conftest import Hub, nothing_retained

pytestmark = pytest.mark.timeout(90)
BIG = 1 << 13
"""So small that freed memory stays mapped: a source that reads unmapped memory dies."""


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.nn.Parameter(torch.arange(float(BIG))), "b": torch.ones(3)}


def resize(parameter: torch.Tensor) -> None:
    parameter.data.resize_(4 * BIG)


def exchange(parameter: torch.Tensor) -> None:
    parameter.data = torch.zeros(BIG)


def shrink(parameter: torch.Tensor) -> None:
    parameter.data = torch.zeros(3)


def free(parameter: torch.Tensor) -> None:
    parameter.data.untyped_storage().resize_(0)


def set_other(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.set_(torch.zeros(BIG))


MOVES = [resize, exchange, shrink, free, set_other]


@nothing_retained
@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("move", MOVES)
def test_every_call_notices_memory_that_moved(here: Hub, move: Callable[[Any], None], published: bool) -> None:
    worker, tensors = here.worker("trainer"), weights()
    worker.register(tensors)
    worker.publish(1)
    if not published:
        worker.unpublish()
    move(tensors["w"])
    calls: list[Callable[[], Any]] = [lambda: worker.publish(1), lambda: worker.publish(2)]
    calls += [lambda: worker.replicate(1, timeout_s=1), lambda: worker.update(timeout_s=1)]
    for call in calls:
        with pytest.raises(RegistrationError, match="'w'"):
            call()
    worker.unpublish()
    assert not any(info.whole for info in worker.versions())


@pytest.mark.parametrize("move", MOVES)
def test_a_reader_gets_what_was_published_or_an_error(here: Hub, move: Callable[[Any], None]) -> None:
    """A parameter that got other memory leaves its old memory to the readers; freed memory fails its checksum."""
    worker, tensors = here.worker("trainer"), weights()
    worker.register(tensors)
    worker.publish(1)
    move(tensors["w"])
    reader, copies = here.worker(), {"w": torch.full((BIG,), 7.0), "b": torch.zeros(3)}
    reader.register(copies)
    if move in (resize, free):
        scratch = torch.full((BIG,), 3.0)  # takes the memory that was freed
        with pytest.raises(CorruptTransfer, match="trainer"):
            reader.replicate(timeout_s=20)
        assert reader.version is None
        assert (scratch == 3.0).all()
    else:
        assert reader.replicate(timeout_s=20) == 1
        assert torch.equal(copies["w"], torch.arange(float(BIG)))


@nothing_retained
def test_a_number_is_bound_to_its_bytes_for_ever(here: Hub) -> None:
    worker, array = here.worker("trainer"), np.arange(4, dtype=np.float32)
    worker.register({"w": array})
    assert worker.publish(3) == 3
    assert worker.publish(3) == 3
    assert worker.counters.published == 1
    worker.unpublish()
    assert worker.publish(3) == 3, "the same bytes again"
    worker.unpublish()
    array[0] = -0.0
    with pytest.raises(VersionConflict, match="3"):
        worker.publish(3)
    with pytest.raises(VersionConflict):
        worker.publish(2)
    array[0] = 0.0
    other, twin = here.worker("other"), here.worker("twin")
    other.register({"w": torch.tensor([-0.0, 1, 2, 3])})
    twin.register({"w": torch.arange(4, dtype=torch.float32)})
    with pytest.raises(VersionConflict):
        other.publish(3)
    assert not any(info.whole for info in other.versions())
    assert twin.publish(3) == 3
    assert other.publish(4) == 4, "a refused publish leaves the worker usable"


@pytest.mark.parametrize("wrong", [math.nan, "3", [1]])
def test_what_is_no_time_is_refused(here: Hub, wrong: Any) -> None:
    worker = here.worker("trainer")
    worker.register({"w": np.ones(3)})
    for call in (worker.replicate, worker.update, worker.wait):
        with pytest.raises(ConfigError, match="seconds"):
            call(timeout_s=wrong)


@pytest.mark.parametrize("none", [0, -1.0, -math.inf, np.float32(0)])
def test_no_time_at_all_is_a_passed_deadline(here: Hub, none: Any) -> None:
    worker, array = here.worker("trainer"), np.full(3, -1.0)
    worker.register({"w": array})
    for call in (worker.replicate, worker.update, worker.wait):
        with pytest.raises(DeadlineExceeded):
            call(timeout_s=none)
    assert (array == -1).all()
    assert worker.publish(1) == 1, "nothing was begun"


@pytest.mark.parametrize("plenty", [math.inf, 1e300, 10**18])
def test_more_time_than_there_is_means_to_wait(here: Hub, plenty: float) -> None:
    worker, reader = here.worker("trainer"), here.worker()
    worker.register({"w": np.ones(3)})
    worker.publish(1)
    array = np.zeros(3)
    reader.register({"w": array})
    assert reader.wait(timeout_s=plenty) == 1
    assert reader.replicate(timeout_s=plenty) == 1
    reader.unpublish(timeout_s=plenty)
    assert (array == 1).all()


@pytest.mark.parametrize(
    "boxes",
    [
        3,
        [3],
        Box("w", (0, 0), (4, 4), (0, 0)),
        [Box("w", (0.0, 0), (4, 4), (0, 0))],
        [Box("w", (0, 0), (5, 4), (0, 0))],
    ],  # type: ignore[arg-type]
)
def test_boxes_that_are_none_are_refused_by_name(here: Hub, boxes: Any) -> None:
    worker = here.worker("trainer")
    with pytest.raises(RegistrationError, match=r"Box|whole numbers|'tp\.w'"):
        worker.register({"tp.w": np.ones((4, 4))}, {"tp.w": boxes})


def test_shards_merged_wrongly_under_one_logical_name_are_never_served(here: Hub) -> None:
    """Two registered tensors say that they are the same region: readers get neither while their bytes differ."""
    box = Box("w", (0, 0), (4, 4), (0, 0))
    parts = {name: np.full((4, 4), value, np.float32) for name, value in (("a", 1), ("b", 2))}
    trainer, reader, array = here.worker("trainer"), here.worker(), np.full((4, 4), 7, np.float32)
    trainer.register(parts, {"a": [box], "b": [box]})
    trainer.publish(1)
    reader.register({"w": array})
    with pytest.raises(LayoutMismatch, match="'w'"):
        reader.replicate(timeout_s=20)
    assert (array == 7).all()
    trainer.unpublish()
    parts["b"][...] = 1
    trainer.publish(2)
    assert reader.replicate(timeout_s=20) == 2
    assert (array == 1).all()
