"""Runs on the ranks: a data-parallel trainer that loses one of them, by its end, by standing still or by an error."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta
from typing import Any

import torch

from tensorhub_core.errors import TensorHubError
from tensorhub_megatron import attach_fsdp

from . import fsdp_trainers

_JOBS: list[tuple[torch.optim.Optimizer, Any]] = []


def begin(rank: int, address: str, patience_s: float) -> None:
    """Attach through a group whose ranks wait for each other no longer than that."""
    group = torch.distributed.new_group(timeout=timedelta(seconds=patience_s), backend="gloo")
    module = fsdp_trainers.Model()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    publisher = attach_fsdp(module, optimizer, server=address, model="m", group=group, settings={"handover_s": 0.5})
    _JOBS[:] = [(optimizer, publisher)]


def step_without(rank: int, victim: int, told: str) -> None:
    """Step on all ranks but one, which stands still; write down the error of each other one."""
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    said = _step()
    with open(f"{told}.{rank}.part", "w", encoding="utf-8") as file:
        file.write(said)
    os.replace(file.name, f"{told}.{rank}")


def raise_on_one(rank: int, victim: int) -> tuple[str, int]:
    """Let a step raise on one rank alone, which goes on with the next; return the error, and the newest version."""
    optimizer, publisher = _JOBS[0]
    if rank == victim:
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
    return _step(), publisher.version


def attach_unlike(rank: int, address: str) -> str:
    """Attach with what each rank makes up for itself; return the error."""
    optimizer = torch.optim.SGD(fsdp_trainers.Model().parameters(), lr=0.1)
    try:
        attach_fsdp(
            fsdp_trainers.Model(), optimizer, server=address, model="m", stream=f"run-{os.getpid()}", every=1 + rank
        )
    except TensorHubError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def end(rank: int) -> None:
    """Leave."""
    _JOBS.pop()[1].close()


def _step() -> str:
    try:
        _JOBS[0][0].step()
    except TensorHubError as error:
        return f"{type(error).__name__}: {error}"
    return ""
