"""Runs on the ranks: build a model, describe it with the product, and send both that and its weights home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.layout.types import Layout
from tensorhub_megatron.layout import describe

from .models import Built, Recipe, build, global_names
from .reference import Array, Share

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

SEGMENT_BYTES = 4096
"""Smaller than the matrices, so that these are read in parts."""


@dataclass(frozen=True)
class Sent:
    """One rank's layout, its bytes by storage (u8), and its shares of the whole model."""

    layout: Layout
    memory: list[Any]
    shares: list[Share]


def send(rank: int, recipe: Recipe, changes: Mapping[str, int] | None = None) -> Sent:
    """Build a rank's part of a model, describe and register it.

    `changes` adds to the first elements of parameters that `rank:name` names.
    """
    built = build(recipe)
    with torch.no_grad():
        for chunk in built.chunks:
            for name, parameter in chunk.module.named_parameters():
                if changes and changes.get(f"{rank}:{name}"):
                    parameter.view(-1)[0] += changes[f"{rank}:{name}"]
    described = describe(built.chunks, recipe.hf_config())
    assert described.moved() == []
    registered = RegisteredMemory(
        described.tensors, described.boxes, shard=rank, num_shards=recipe.world, segment_bytes=SEGMENT_BYTES
    )
    registered.collect()
    return Sent(registered.layout, [np.array(buffer) for buffer in registered.buffers], shares_of(built))


def shares_of(built: Built) -> list[Share]:
    """Return a rank's shares of the whole model."""
    return [
        Share(whole, axis, part, parts, array_of(parameter))
        for chunk in built.chunks
        for whole, parameter, axis, (part, parts) in global_names(chunk.module).values()
    ]


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's bits as an array of integers."""
    # A clone: memory that numpy has seen cannot be resized any more, and offloading resizes it.
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(_INTS[tensor.element_size()]).numpy()
