"""Whoever reads what a sharded PyTorch module publishes has what gathering each parameter gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tensorhub_core import connect, serve

from . import fsdp_trainers
from .ranks import Ranks
from .readers import Engine, whole_layout

KINDS = {
    "fsdp": ("fsdp", 2, {}),
    "fsdp-of-4": ("fsdp", 4, {}),
    "fsdp-cast": ("fsdp", 2, {"cast": "bf16"}),
    "replicated-shards": ("replicated shards", 4, {}),
    "tensor-parallel": ("tensor parallel", 4, {}),
    "tensor-parallel-cast": ("tensor parallel", 4, {"cast": "bf16"}),
    "ddp": ("ddp", 2, {}),
    "fsdp-wrapped-offloaded-mixed-cast": ("wrapped fsdp", 2, {"cast": "bf16"}),
}


@pytest.fixture
def address() -> Iterator[str]:
    with serve() as server:
        yield server.address


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", KINDS)
def test_a_reader_has_the_weights_of_each_step(name: str, ranks: Callable[[int], Ranks], address: str) -> None:
    kind, world, how = KINDS[name]
    how = {**how, "stream": "run", "start_version": 3}
    job = ranks(world)
    layout = whole_layout(fsdp_trainers.SHAPES, "bfloat16" if "cast" in how else "float32")
    begun = job.run(fsdp_trainers.begin, kind, address, how)
    with Engine(address, [layout]) as reader:
        assert reader.update() == 3
        reader.require(begun[0])
        for version in (4, 5):
            results: list[tuple[Any, int]] = job.run(fsdp_trainers.train, version == 5)
            assert {published for _, published in results} == {version}
            assert reader.update() == version
            reader.require(results[0][0])
        loaded = job.run(fsdp_trainers.reload)
        assert reader.update() == 6
        reader.require(loaded[0])
        job.run(fsdp_trainers.end)
    with connect(address, model="m", replica="watcher") as watcher:
        assert not any(info.whole for info in watcher.versions())


@pytest.mark.timeout(60)
def test_a_group_of_ranks_publishes_while_others_do_something_else(ranks: Callable[[int], Ranks], address: str) -> None:
    job, some = ranks(4), [1, 3]
    begun = job.run(fsdp_trainers.begin_on_some, address, some)
    assert [error for error, _ in begun] == [
        "ConfigError: this rank is not in `group`: attach on the group's ranks only",
        "",
        "",
        "",
    ]
    with Engine(address, [whole_layout(fsdp_trainers.SHAPES, "float32")]) as reader:
        assert reader.update() == 0
        reader.require(begun[1][1])
        job.run(fsdp_trainers.end_on_some, some)


@pytest.mark.timeout(60)
def test_what_one_rank_cannot_describe_is_raised_on_all(ranks: Callable[[int], Ranks], address: str) -> None:
    errors = ranks(2).run(fsdp_trainers.refusal, "ddp", address)
    assert all(error.startswith("RegistrationError: ") for error in errors)
    assert all("'embedding.weight' is partitioned by DeepSpeed ZeRO-3" in error for error in errors)
    assert "rank 1 of the trainer" in errors[0]
