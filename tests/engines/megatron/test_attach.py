"""Engines take every version that a Megatron trainer publishes, and have its model bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorhub_core import connect, serve
from tensorhub_core.layout.types import Layout

from . import trainers
from .engine_layouts import engine_layout, logical_shapes
from .models import Recipe
from .ranks import Ranks
from .readers import Engine, whole_layout
from .reference import hugging_face
from .test_layouts import shape_of

RECIPES = {
    "tp2": Recipe(tp=2, qk_norm=True),
    "pp2-tied": Recipe(pp=2, tied=True),
    "vpp2-optimizer-overlap": Recipe(pp=2, vpp=2, layers=4, dist_opt=True, overlap=True),
    "tp2-pp2": Recipe(tp=2, pp=2),
    "dp2-optimizer-overlap": Recipe(dp=2, dist_opt=True, overlap=True, qkv_bias=True),
    "ep2": Recipe(dp=2, ep=2, experts=4, dist_opt=True, qk_norm=True),
}
STEPS = 3
SETTINGS = {"handover_s": 0.5}
"""A trainer that ends last has nobody to hand over to."""


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with serve(retain=getattr(request, "param", None)) as server:
        yield server.address


def layouts_of(recipe: Recipe, tp: int) -> list[Layout]:
    """Return the layouts of an engine; 0 stands for one worker that holds Hugging Face's tensors as they are."""
    shape = shape_of(recipe)
    if not tp:
        return [whole_layout(logical_shapes(shape), shape.dtype)]
    return [engine_layout(shape, tp, rank) for rank in range(tp)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tp", [0, 2], ids=["whole", "engine-tp2"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_engine_has_the_model_of_each_step(name: str, tp: int, ranks: Callable[[int], Ranks], address: str) -> None:
    recipe, job = RECIPES[name], ranks(RECIPES[name].world)
    how = {"stream": "run", "start_version": 5, "hf_config": recipe.hf_config()}
    started = job.run(trainers.begin, recipe, address, how)
    with Engine(address, layouts_of(recipe, tp)) as engine:
        assert engine.update() == 5
        engine.require(hugging_face(started, recipe))
        for step in range(1, STEPS + 1):
            shares, versions, results = zip(*job.run(trainers.train), strict=True)
            assert set(versions) == {5 + step}
            assert all(result[0][0] is True for result in results)
            assert engine.update() == 5 + step
            engine.require(hugging_face(shares, recipe))
    job.run(trainers.end)
    alone = job.run(trainers.train_alone, recipe, STEPS)
    engine.require(hugging_face(alone, recipe))
    with connect(address, model="m", replica="watcher") as watcher:
        assert not any(info.whole for info in watcher.versions())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["pp2-tied", "dp2-optimizer-overlap"])
def test_an_engine_that_reads_while_ranks_train_never_has_a_mix(
    name: str, ranks: Callable[[int], Ranks], address: str
) -> None:
    recipe, job, steps = RECIPES[name], ranks(2), 12
    job.run(trainers.begin, recipe, address, {"hf_config": recipe.hf_config(), "settings": SETTINGS})
    with Engine(address, layouts_of(recipe, 2)) as engine, ThreadPoolExecutor(1) as pool:
        following = pool.submit(engine.follow, steps)
        trained = job.run(trainers.train_on, steps)
        taken = following.result(60)
        assert all(worker.counters.rereads == 0 for worker in engine.workers)
        for version in taken.keys() & trained[0].keys():
            engine.put(taken[version])
            engine.require(hugging_face([each[version] for each in trained], recipe))
        assert steps in taken
    job.run(trainers.end)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["tp2", "dp2-optimizer-overlap"])
def test_a_skipped_step_makes_no_version_and_the_same_one_can_be_read(
    name: str, ranks: Callable[[int], Ranks], address: str
) -> None:
    recipe, job = RECIPES[name], ranks(2)
    job.run(trainers.begin, recipe, address, {"hf_config": recipe.hf_config(), "settings": SETTINGS})
    job.run(trainers.train)
    shares, versions, results = zip(*job.run(trainers.overflow), strict=True)
    assert [result[0] for result in results] == [False, False]
    assert set(versions) == {1}
    with Engine(address, layouts_of(recipe, 2)) as engine:
        assert engine.update() == 1
        engine.require(hugging_face(shares, recipe))
        shares, versions, _ = zip(*job.run(trainers.train), strict=True)
        assert set(versions) == {2}
        assert engine.update() == 2
        engine.require(hugging_face(shares, recipe))
    job.run(trainers.end)


@pytest.mark.timeout(120)
def test_an_engine_slower_than_the_trainer_gets_the_newest_of_every_second_step(
    ranks: Callable[[int], Ranks], address: str
) -> None:
    recipe, job = RECIPES["tp2"], ranks(2)
    job.run(trainers.begin, recipe, address, {"every": 2, "hf_config": recipe.hf_config(), "settings": SETTINGS})
    with Engine(address, layouts_of(recipe, 2)) as engine:
        assert engine.update() == 0
        shares, versions, _ = zip(*job.run(trainers.train, 6), strict=True)
        assert set(versions) == {3}
        assert engine.update() == 3
        engine.require(hugging_face(shares, recipe))
        _, versions, _ = zip(*job.run(trainers.train, 1), strict=True)
        assert set(versions) == {3}
    job.run(trainers.end)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("address", [0], indirect=True, ids=["retaining nothing"])
@pytest.mark.parametrize("politely", [True, False], ids=["taken back first", "unasked"])
@pytest.mark.parametrize("name", ["tp2", "dp2-optimizer-overlap"])
def test_parameters_that_were_offloaded_are_published_from_where_they_came_back(
    name: str, politely: bool, ranks: Callable[[int], Ranks], address: str
) -> None:
    recipe, job = RECIPES[name], ranks(2)
    begun = job.run(trainers.begin, recipe, address, {"hf_config": recipe.hf_config(), "settings": SETTINGS})
    assert job.run(trainers.move, politely) == [True, True]
    with Engine(address, layouts_of(recipe, 2)) as engine:
        if politely:
            assert engine.update() == 0
            engine.require(hugging_face(begun, recipe))
        shares, versions, _ = zip(*job.run(trainers.train), strict=True)
        assert set(versions) == {1}
        assert engine.update() == 1
        engine.require(hugging_face(shares, recipe))
    job.run(trainers.end)


@pytest.mark.timeout(120)
def test_no_rank_steps_while_an_engine_reads_from_any(ranks: Callable[[int], Ranks], address: str) -> None:
    recipe, job = RECIPES["pp2-tied"], ranks(2)
    begun = job.run(trainers.begin, recipe, address, {"hf_config": recipe.hf_config(), "settings": SETTINGS})
    reading, leave = threading.Event(), threading.Event()

    def hold(done: int, total: int, source: str) -> None:
        reading.set()
        leave.wait(60)

    with Engine(address, layouts_of(recipe, 0)) as engine:
        thread = threading.Thread(target=lambda: engine.update(progress=hold))
        thread.start()
        assert reading.wait(30)
        errors, shares, waits = zip(*job.run(trainers.try_to_train, 1.0), strict=True)
        assert all(error.startswith("DeadlineExceeded: ") for error in errors), errors
        assert hugging_face(shares, recipe).keys() == hugging_face(begun, recipe).keys()
        for name, array in hugging_face(begun, recipe).items():
            assert (hugging_face(shares, recipe)[name] == array).all(), name
        assert all(wait >= 0.9 for wait in waits)
        leave.set()
        thread.join(30)
        engine.require(hugging_face(begun, recipe))
        shares, versions, _ = zip(*job.run(trainers.train), strict=True)
        assert set(versions) == {1}
        assert engine.update() == 1
        engine.require(hugging_face(shares, recipe))
    job.run(trainers.end)


@pytest.mark.timeout(120)
def test_ranks_go_on_with_a_hub_that_was_started_again(ranks: Callable[[int], Ranks]) -> None:
    recipe, job = RECIPES["tp2"], ranks(2)
    with serve(lease_s=1, heartbeat_s=0.2) as first:
        address = first.address
        job.run(trainers.begin, recipe, address, {"stream": "run", "settings": SETTINGS})
        job.run(trainers.train)
    with serve(address, lease_s=1, heartbeat_s=0.2):
        shares, versions, _ = zip(*job.run(trainers.train), strict=True)
        assert set(versions) == {2}
        with Engine(address, layouts_of(recipe, 2)) as engine:
            assert engine.update() == 2
            engine.require(hugging_face(shares, recipe))
        job.run(trainers.end)


@pytest.mark.timeout(120)
def test_what_one_rank_cannot_describe_is_raised_on_all(ranks: Callable[[int], Ranks], address: str) -> None:
    recipe, job = RECIPES["tp2"], ranks(2)
    errors = job.run(trainers.begin_or_say, recipe, address, {}, {1: "/nowhere"})
    assert errors[1].startswith("ConfigError: hf_config names '/nowhere'")
    assert errors[0].startswith("ConfigError: publishing failed on rank 1 of the trainer: hf_config names '/nowhere'")
    with connect(address, model="m", replica="watcher") as watcher:
        assert watcher.versions() == []


@pytest.mark.timeout(120)
def test_ranks_that_lose_one_do_not_step(address: str, tmp_path: Path) -> None:
    recipe, told = RECIPES["tp2"], tmp_path / "told"
    with Ranks(2) as job:
        job.run(trainers.begin, recipe, address, {"hf_config": recipe.hf_config(), "settings": SETTINGS})
        with pytest.raises(AssertionError, match="rank 1: it ended"):
            job.run(trainers.train_or_end, 1, str(told))
    assert told.read_text().startswith("StateError: ")
    assert "rank 1 of the trainer is gone or does not come" in told.read_text()
