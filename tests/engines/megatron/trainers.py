"""Runs on the ranks: a trainer that publishes, step by step.

Each function is one `ranks.run(...)`; what they share stays in the rank's process in between, where weights are
published and read meanwhile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorhub_core.errors import TensorHubError
from tensorhub_megatron import attach

from .models import LENGTH, VOCAB, Built, Recipe, build
from .reference import Share
from .shares import shares_of

BATCH, MICROBATCHES = 2, 2


@dataclass
class Job:
    """One rank's trainer."""

    built: Built
    publisher: Any = None
    micro: list[torch.Tensor] = field(default_factory=list)


_JOBS: list[Job] = []


def begin(rank: int, recipe: Recipe, address: str, how: dict[str, Any]) -> list[Share]:
    """Build, attach, and return what was published."""
    job = Job(build(recipe))
    _JOBS[:] = [job]
    job.publisher = attach(job.built.chunks, job.built.optimizer, server=address, model="m", **how)
    return shares_of(job.built)


def begin_or_say(rank: int, recipe: Recipe, address: str, how: dict[str, Any], wrong: dict[int, Any]) -> str:
    """Attach with another value of `hf_config` on some ranks; return the error."""
    built = build(recipe)
    try:
        attach(built.chunks, built.optimizer, server=address, model="m", **how, hf_config=wrong.get(rank))
    except TensorHubError as error:
        assert "step" not in vars(built.optimizer)
        return f"{type(error).__name__}: {error}"
    return ""


def train(rank: int, steps: int = 1) -> tuple[list[Share], int, list[Any]]:
    """Train; return what the weights are then, the published version, and what each step returned."""
    job = _JOBS[0]
    results = [_one_step(job) for _ in range(steps)]
    return shares_of(job.built), job.publisher.version, results


def train_on(rank: int, steps: int) -> dict[int, list[Share]]:
    """Train without a pause; return what the weights were at each version."""
    job = _JOBS[0]
    found = {}
    for _ in range(steps):
        _one_step(job)
        found[job.publisher.version] = shares_of(job.built)
    return found


def train_alone(rank: int, recipe: Recipe, steps: int) -> list[Share]:
    """Do the same training without publishing; return the weights."""
    job = Job(build(recipe))
    for _ in range(steps):
        _one_step(job)
    if recipe.overlap:
        for chunk in job.built.chunks:
            chunk.start_param_sync(force_sync=True)
    return shares_of(job.built)


def overflow(rank: int) -> tuple[list[Share], int, Any]:
    """Train a step in which one rank's gradients are infinite; Megatron skips it on all."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    job = _JOBS[0]
    optimizers = getattr(job.built.optimizer, "chained_optimizers", [job.built.optimizer])
    for each in optimizers:
        each.grad_scaler, each.found_inf = ConstantGradScaler(1.0), torch.zeros(1)
    result = _one_step(job, spoil=rank == 0)
    return shares_of(job.built), job.publisher.version, result


def try_to_train(rank: int, timeout_s: float) -> tuple[str, list[Share], float]:
    """Train a step; return the error that came out of it, the weights, and how long it waited for readers."""
    job = _JOBS[0]
    job.publisher._publication._timeout_s = timeout_s
    try:
        _one_step(job)
    except TensorHubError as error:
        return f"{type(error).__name__}: {error}", shares_of(job.built), job.publisher.last_wait_s
    finally:
        job.publisher._publication._timeout_s = None
    return "", shares_of(job.built), job.publisher.last_wait_s


def train_or_end(rank: int, victim: int, told: str) -> None:
    """Train a step on all ranks but one, which ends; write down the error of the others."""
    if rank == victim:
        os._exit(1)
    try:
        _one_step(_JOBS[0], backward=False)
    except TensorHubError as error:
        with open(told, "w", encoding="utf-8") as file:
            file.write(f"{type(error).__name__}: {error}")


def move(rank: int, politely: bool) -> bool:
    """Give the parameters other memory with the same content, as offloading and loading does; tell whether it moved."""
    job = _JOBS[0]
    if politely:
        job.publisher.unpublish()
    before = [parameter.data_ptr() for parameter in _parameters(job)]
    buffers = [buffer for chunk in job.built.chunks for buffer in chunk.buffers if buffer.param_data is not None]
    if buffers:
        for buffer in buffers:
            _move_storage(job, buffer.param_data)
    else:
        for parameter in _parameters(job):
            parameter.data = parameter.data.clone()
    after = [parameter.data_ptr() for parameter in _parameters(job)]
    if politely:
        job.publisher.publish()
    return before != after


def _move_storage(job: Job, data: torch.Tensor) -> None:
    """Let go of a tensor's memory and take other memory for it."""
    storage, saved, before = data.untyped_storage(), data.clone(), data.data_ptr()
    size = storage.nbytes()
    for _ in range(100):  # until what is taken in between has the place that was left, and not another free one
        storage.resize_(0)
        job.micro.append(torch.zeros(size, dtype=torch.uint8))
        storage.resize_(size)
        if data.data_ptr() != before:
            break
    data.copy_(saved)


def end(rank: int) -> None:
    """Leave; the optimizer is then as it was."""
    job = _JOBS.pop()
    job.publisher.close()
    assert "step" not in vars(job.built.optimizer)


def _parameters(job: Job) -> list[torch.nn.Parameter]:
    return [parameter for chunk in job.built.chunks for parameter in chunk.module.parameters()]


def _one_step(job: Job, *, spoil: bool = False, backward: bool = True) -> Any:
    for chunk in job.built.chunks:
        chunk.zero_grad_buffer()
    job.built.optimizer.zero_grad()
    if backward:
        _forward_backward(job)
    if spoil:
        for parameter in _parameters(job):
            parameter.main_grad.fill_(float("inf"))
    return job.built.optimizer.step()


def _forward_backward(job: Job) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    built = job.built
    generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
    micro = [torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator) for _ in range(MICROBATCHES)]
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(LENGTH)[None].expand(BATCH, LENGTH)
    built.config.finalize_model_grads_func = finalize_model_grads
    if built.recipe.overlap:
        syncs = [(chunk.start_grad_sync, chunk.start_param_sync, chunk.no_sync) for chunk in built.chunks]
        grads, params, no_syncs = (list(each) for each in zip(*syncs, strict=True))
        one = len(built.chunks) == 1
        built.config.grad_sync_func = grads[0] if one else grads
        built.config.param_sync_func = params[0] if one else params
        built.config.no_sync_func = no_syncs[0] if one else no_syncs

    def forward(batches: Any, model: Any) -> Any:
        tokens = next(batches)
        output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
        return output, lambda losses: (losses.float().mean(), {})

    batches = [iter(micro) for _ in built.chunks]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=built.chunks if len(built.chunks) > 1 else built.chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
