"""Runs on the ranks: build a model, describe it with the product, and send both that and its weights home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.types import Layout, TensorSpec
from tensorhub_megatron.layout import Described, describe

from .models import Built, Recipe, build, global_names
from .reference import Array, Share

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Sent:
    """One rank's layout, its bytes by storage (u8), and its shares of the whole model."""

    layout: Layout
    memory: list[Any]
    shares: list[Share]


def send(rank: int, recipe: Recipe, changes: Mapping[str, int] | None = None) -> Sent:
    """Build a rank's part of a model and describe it; `changes` adds to local parameters' first elements by name."""
    built = build(recipe)
    with torch.no_grad():
        for chunk in built.chunks:
            for name, parameter in chunk.module.named_parameters():
                if changes and changes.get(f"{rank}:{name}"):
                    parameter.view(-1)[0] += changes[f"{rank}:{name}"]
    described = describe(built.chunks, recipe.hf_config())
    assert described.moved() == []
    layout = layout_of(described, rank, recipe.world)
    memory = [bytes_of(described.tensors[layout.tensors[group[0]].name]) for group in layout.storages]
    return Sent(layout, memory, shares_of(built))


def layout_of(described: Described, rank: int, world: int) -> Layout:
    """Return the layout that registering would make."""
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), described.boxes[name])
        for name, tensor in described.tensors.items()
    ]
    places: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in described.tensors.items():
        places.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    return build_layout(specs, places.values(), shard=rank, num_shards=world)


def shares_of(built: Built) -> list[Share]:
    """Return a rank's shares of the whole model."""
    return [
        Share(whole, axis, part, parts, array_of(parameter))
        for chunk in built.chunks
        for whole, parameter, axis, (part, parts) in global_names(chunk.module).values()
    ]


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's bits as an array of integers."""
    return np.array(tensor.detach().contiguous().view(_INTS[tensor.element_size()]).numpy())


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes, u8 [bytes]."""
    return array_of(tensor).reshape(-1).view(np.uint8)
