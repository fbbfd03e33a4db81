"""Describe the parameters of a module as boxes: plain ones, and the local shards of distributed tensors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorhub_core.errors import RegistrationError
from tensorhub_core.layout.types import Box
from tensorhub_megatron.modules import named_weights

if TYPE_CHECKING:
    import torch


def named_shards(module: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by the model's own names, in the state that they have between steps.

    FSDP2 leaves the root's parameters gathered after a forward pass: they are let go. Raises RegistrationError as
    `named_weights` does.
    """
    import torch

    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # without it nothing is sharded
    for part in module.modules() if fsdp is not None and isinstance(module, torch.nn.Module) else ():
        if isinstance(part, fsdp.FSDPModule):  # others may have methods of that name, too
            part.reshard()
    return named_weights(module)


def local_part(parameter: Any) -> torch.Tensor:
    """Return the memory that this rank has of a parameter: itself, or the local shard of a distributed tensor."""
    import torch

    with torch.no_grad():
        local: torch.Tensor = parameter.to_local() if hasattr(parameter, "placements") else parameter
    return local


def boxes_of_shard(name: str, logical: str, parameter: Any) -> tuple[Box, ...]:
    """Return where the local shard of a parameter lies in the logical tensor; empty for an empty shard.

    Several boxes where the shard is not one region, as an uneven `fully_shard` of a tensor-parallel axis makes it.
    Raises RegistrationError naming a parameter that waits for a reduction.
    """
    rank = len(parameter.shape)
    axes = [[(0, int(length))] for length in parameter.shape]
    if hasattr(parameter, "placements"):
        for axis, indices in _indices(name, parameter).items():
            axes[axis] = list(_runs(indices))
    local = tuple(local_part(parameter).shape)
    if tuple(sum(length for _, length in runs) for runs in axes) != local:
        raise RegistrationError(f"{name!r} has a local shard of shape {local}, which its placements do not explain")
    if 0 in local:
        return ()
    starts = [list(itertools.accumulate((length for _, length in runs), initial=0)) for runs in axes]
    return tuple(
        Box(
            logical,
            tuple(axes[axis][number][0] for axis, number in enumerate(numbers)),
            tuple(axes[axis][number][1] for axis, number in enumerate(numbers)),
            tuple(starts[axis][number] for axis, number in enumerate(numbers)),
        )
        for numbers in itertools.product(*(range(len(axes[axis])) for axis in range(rank)))
    )


def _indices(name: str, parameter: Any) -> dict[int, torch.Tensor]:
    """Return which indices of each sharded axis this rank holds, in their order."""
    import torch

    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RegistrationError(f"{name!r} is distributed over a mesh without this rank")
    found: dict[int, torch.Tensor] = {}
    for position, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise RegistrationError(f"{name!r} is a sum that was not reduced yet: {placement}")
        if placement.is_replicate():
            continue
        axis = placement.dim % len(parameter.shape)
        indices = found.get(axis, torch.arange(parameter.shape[axis]))
        found[axis] = _split(placement, indices, mesh.size(position))[coordinate[position]]
    return found


def _split(placement: Any, indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Divide indices as a placement divides an axis: in a row, or, on top of tensor parallelism, each of its parts."""
    import torch

    outer = _chunks(indices, getattr(placement, "split_factor", 1))
    inner = [_chunks(chunk, parts) for chunk in outer]
    return [torch.cat([chunks[part] for chunks in inner]) for part in range(parts)]


def _chunks(indices: torch.Tensor, parts: int) -> list[torch.Tensor]:
    found = list(indices.chunk(parts)) if len(indices) else []
    return found + [indices[:0]] * (parts - len(found))


def _runs(indices: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (begin, length) of each run of consecutive indices."""
    if not len(indices):
        yield 0, 0
        return
    breaks = [0, *((indices[1:] - indices[:-1]) != 1).nonzero().flatten().add(1).tolist(), len(indices)]
    for begin, end in itertools.pairwise(breaks):
        yield int(indices[begin]), end - begin
