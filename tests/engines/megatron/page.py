"""Runs on the ranks: what docs/trainers.md shows, with what it takes for granted around it."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.readme.snippets import run_block

from . import fsdp_trainers, trainers
from .models import Recipe, build
from .reference import Array, Share
from .shares import shares_of

STEPS = 2


def fsdp(rank: int, block: str, hub: str, folder: str) -> dict[int, dict[str, Array]]:
    """Run the block for FSDP2; return the whole weights at each version."""
    found: dict[int, dict[str, Array]] = {}

    def train(model: Any, optimizer: Any) -> None:
        job = fsdp_trainers.Job(model, optimizer, rank, optimizer._tensorhub_publisher, torch.bfloat16)
        fsdp_trainers._JOBS[:] = [job]
        for _ in range(STEPS):
            weights, version = fsdp_trainers.train(rank)
            found[version] = weights

    with _hub(hub):
        run_block(block, _own(folder, rank), torch=torch, model=fsdp_trainers.Model(), train=train)
    return found


def megatron_lm(rank: int, block: str, hub: str, folder: str, recipe: Recipe) -> dict[int, list[Share]]:
    """Run the block for Megatron-LM, then what `pretrain()` does; return the weights at each version."""
    built = build(recipe)
    training: Any = types.ModuleType("megatron.training.training")
    training.setup_model_and_optimizer = lambda provider, kind: (built.chunks, built.optimizer, "scheduler")
    with _hub(hub), _modules({"megatron.training": types.ModuleType("megatron.training"), training.__name__: training}):
        os.chdir(folder)
        sys.modules["megatron.training"].training = training  # type: ignore[attr-defined]
        run_block(block, _own(folder, rank))
        assert training.setup_model_and_optimizer("provider", kind="gpt") == (
            built.chunks,
            built.optimizer,
            "scheduler",
        )
    publisher = built.optimizer._tensorhub_publisher
    found = {0: shares_of(built)}
    for _ in range(STEPS):
        trainers._one_step(trainers.Job(built))
        found[publisher.version] = shares_of(built)
    publisher.close()
    return found


def bridge(rank: int, block: str, hub: str, folder: str, recipe: Recipe) -> dict[int, list[Share]]:
    """Run the block for Megatron-Bridge against a stand-in of its `pretrain()`; return the weights at each version."""
    built = build(recipe)
    found: dict[int, list[Share]] = {}

    def pretrain(config: Any, forward_step: Any, callbacks: list[Any]) -> None:
        state = SimpleNamespace(train_state=SimpleNamespace(step=0))
        context = SimpleNamespace(model=built.chunks, optimizer=built.optimizer, state=state, skipped_iter=False)
        (callback,) = callbacks
        callback.on_train_start(context)
        for _ in range(STEPS):
            callback.on_train_step_start(context)
            trainers._one_step(trainers.Job(built))
            state.train_state.step += 1
            callback.on_train_step_end(context)
            found[callback.version] = shares_of(built)
        callback.on_train_end(context)

    names = ["megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.pretrain"]
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].pretrain = pretrain
    with _hub(hub), _modules(modules):
        os.chdir(folder)
        run_block(block, _own(folder, rank), config=None, forward_step=None)
    return found


def _own(folder: str, rank: int) -> Path:
    """Return a folder of this rank's own."""
    own = Path(folder) / f"rank-{rank}"
    own.mkdir()
    return own


@contextlib.contextmanager
def _hub(address: str) -> Iterator[None]:
    """Name the hub as users do; processes of ranks go on afterwards, in the folder they were in."""
    before = os.getcwd()
    os.environ["TENSORHUB_SERVER"] = address
    try:
        yield
    finally:
        del os.environ["TENSORHUB_SERVER"]
        os.chdir(before)


@contextlib.contextmanager
def _modules(modules: dict[str, Any]) -> Iterator[None]:
    """Have modules that are not installed."""
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
