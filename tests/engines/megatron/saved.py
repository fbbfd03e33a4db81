"""Runs on the ranks: build a model and save it as Megatron does."""

from __future__ import annotations

import argparse
import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed

from .models import HEAD_DIM, HEADS, Built, Recipe, build
from .reference import Share
from .shares import shares_of


def save(
    rank: int, recipe: Recipe, folder: str, *, with_optimizer: bool = False, zero_centered_norms: bool = False
) -> list[Share]:
    """Save a rank's part of a model with `dist_checkpointing`, and return its shares of the whole one."""
    from megatron.core import dist_checkpointing

    built = build(recipe)
    args = argparse.Namespace(  # as Megatron-LM's; without groups the number of them is 1
        num_attention_heads=HEADS,
        group_query_attention=recipe.groups != HEADS,
        num_query_groups=recipe.groups if recipe.groups != HEADS else 1,
        kv_channels=HEAD_DIM,
        apply_layernorm_1p=zero_centered_norms,
        params_dtype=torch.bfloat16,
    )
    state: dict[str, Any] = {"iteration": 7, "args": args}
    models = [chunk.module.sharded_state_dict() for chunk in built.chunks]
    if len(models) == 1:
        state["model"] = models[0]
    else:
        state.update({f"model{number}": model for number, model in enumerate(models)})
    if with_optimizer:
        _step(built)
        state["optimizer"] = built.optimizer.sharded_state_dict(
            state, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
        )
    with _able_to_fork():
        dist_checkpointing.save(state, folder)
    torch.distributed.barrier()
    return shares_of(built)


def _step(built: Built) -> None:
    """Let the optimizer have a state."""
    for chunk in built.chunks:
        chunk.zero_grad_buffer()
    built.optimizer.step()
    if built.recipe.overlap:
        for chunk in built.chunks:
            chunk.start_param_sync(force_sync=True)


@contextmanager
def _able_to_fork() -> Iterator[None]:
    """Let a rank, which is a daemon here, write files with processes of its own, and hear of them in its memory."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # else a process is started only to hold it
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    try:
        yield
    finally:
        process._config["daemon"] = True
