"""What docs/trainers.md shows works: each of its blocks runs, and a reader has the weights of the version it gets.

Megatron-LM and Megatron-Bridge, which need a GPU, are stood in for around real models of megatron-core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from tensorhub_core import serve
from tests.readme.snippets import named_blocks, run_block, started

from . import fsdp_trainers, page
from .engine_layouts import engine_layout
from .hf_models import Lines, tiny_model
from .models import Recipe
from .ranks import Ranks
from .readers import Engine, whole_layout
from .reference import hugging_face
from .shares import array_of
from .test_layouts import shape_of

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = named_blocks((ROOT / "docs" / "trainers.md").read_text(encoding="utf-8"))
RECIPE = Recipe(tp=2, qk_norm=True)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serve() as server:
        monkeypatch.setenv("TENSORHUB_SERVER", server.address)
        yield server.address


def reader_of(address: str, shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> Engine:
    return Engine(address, [whole_layout(shapes, dtype)], model="policy")


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def weights_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: array_of(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


def test_each_trainer_takes_under_ten_lines() -> None:
    assert set(BLOCKS) == {"plain", "fsdp", "trainer", "megatron-lm", "bridge", "checkpoint", "by-hand"}
    for name, block in BLOCKS.items():
        assert 1 <= sum(bool(line.strip()) for line in block.splitlines()) < 10, name


@pytest.mark.timeout(60)
def test_plain_pytorch(address: str, tmp_path: Path) -> None:
    model = tiny_model()
    versions = []
    with reader_of(address, shapes_of(model)) as reader:

        def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
            for _ in range(page.STEPS):
                model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
                optimizer.step()
                versions.append(reader.update())
                reader.require(weights_of(model))

        optimizer = torch.optim.AdamW(model.parameters())
        run_block(BLOCKS["plain"], tmp_path, model=model, optimizer=optimizer, train=train)
    assert versions == [1, 2]


@pytest.mark.timeout(90)
def test_fsdp2(ranks: Callable[[int], Ranks], address: str, tmp_path: Path) -> None:
    with reader_of(address, fsdp_trainers.SHAPES, "bfloat16") as reader, ThreadPoolExecutor(1) as pool:
        following = pool.submit(reader.follow, page.STEPS)
        trained = ranks(2).run(page.fsdp, BLOCKS["fsdp"], address, str(tmp_path))
        taken = following.result(60)
        assert sorted(trained[0]) == [1, 2]
        assert 2 in taken
        for version in taken.keys() & trained[0].keys():
            reader.put(taken[version])
            reader.require(trained[0][version])


@pytest.mark.timeout(90)
def test_hugging_face_trainer(address: str, tmp_path: Path) -> None:
    model = tiny_model()
    args = TrainingArguments(
        str(tmp_path), max_steps=page.STEPS, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_steps=99
    )
    with reader_of(address, shapes_of(model)) as reader, ThreadPoolExecutor(1) as pool:
        following = pool.submit(reader.follow, page.STEPS)
        run_block(BLOCKS["trainer"], tmp_path, model=model, args=args, data=Lines())
        assert page.STEPS in following.result(60)
        reader.require(weights_of(model))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", ["megatron-lm", "bridge"])
def test_megatron(name: str, ranks: Callable[[int], Ranks], address: str, tmp_path: Path) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B" / "config.json").write_text(json.dumps(RECIPE.hf_config()))
    run = {"megatron-lm": page.megatron_lm, "bridge": page.bridge}[name]
    layouts = [engine_layout(shape_of(RECIPE), 2, rank) for rank in range(2)]
    with Engine(address, layouts, model="policy") as engine, ThreadPoolExecutor(1) as pool:
        following = pool.submit(engine.follow, page.STEPS)
        trained = ranks(2).run(run, BLOCKS[name], address, str(tmp_path), RECIPE)
        taken = following.result(60)
        assert page.STEPS in taken
        for version in taken.keys() & trained[0].keys():
            engine.put(taken[version])
            engine.require(hugging_face([rank[version] for rank in trained], RECIPE))


@pytest.mark.timeout(90)
def test_a_checkpoint(address: str, tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "Qwen3-8B")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    stored = {name: shape for name, shape in shapes_of(model).items() if name != "lm_head.weight"}  # tied: not saved
    with (
        started(BLOCKS["checkpoint"], tmp_path, environment, tmp_path / "output"),
        reader_of(address, stored) as reader,
    ):
        assert reader.update() == 0
        reader.require(weights_of(model))
        until_s = time.monotonic() + 20
        while "published policy 0" not in (tmp_path / "output").read_text():
            assert time.monotonic() < until_s
            time.sleep(0.05)


@pytest.mark.timeout(60)
def test_by_hand(address: str, tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    workers = []
    for rank in range(2):
        part = whole[rank * 3 : rank * 3 + 3].clone()
        made: dict[str, Any] = run_block(BLOCKS["by-hand"], tmp_path, part=part, rank=rank, world=2)
        workers.append(made["worker"])
    with reader_of(address, {"lm_head.weight": (6, 4)}) as reader:
        assert reader.update() == 1
        reader.require({"lm_head.weight": np.asarray(whole)})
        for worker in workers:
            worker.close()
