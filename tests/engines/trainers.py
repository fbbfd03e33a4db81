"""How trainers hold a checkpoint: plain, by rows as FSDP does, and as Megatron does with tensor parallelism of 2.

Written from what these trainers do, not from the product's own adapters: names, shapes and slices of numpy, no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tensorhub_core import connect
from tensorhub_core.layout.types import Box

Tensors = dict[str, torch.Tensor]
RANKS = 2
COLUMNS = ("o_proj.weight", "down_proj.weight", "c_proj.weight")
"""Sharded along their second axis by Megatron; GPT-2's Conv1D lies the other way round, which is no matter here."""
_ROWS = 64
"""Megatron pads the vocabulary to a multiple of this for each rank."""


@dataclass
class Shard:
    """One rank's memory: tensors by the trainer's names, and where parts of logical tensors lie in them."""

    tensors: Tensors = field(default_factory=dict)
    boxes: dict[str, list[Box]] = field(default_factory=dict)

    def put(self, name: str, shape: tuple[int, ...], parts: list[tuple[str, torch.Tensor, int, int]]) -> None:
        """Add a tensor of this shape: (logical name, logical tensor, its first row, rows) one below the other."""
        dtype, at = parts[0][1].dtype, 0
        self.tensors[name], self.boxes[name] = torch.full(shape, 7.0, dtype=dtype), []
        for logical, whole, begin, rows in parts:
            self.tensors[name][at : at + rows] = whole[begin : begin + rows]
            rest = (0,) * (whole.dim() - 1)
            box = Box(logical, (begin, *rest), (rows, *whole.shape[1:]), (at, *rest))
            self.boxes[name].append(box)
            at += rows


def plain(real: Tensors, config: dict[str, Any]) -> list[Shard]:
    """One process has every tensor whole."""
    return [Shard(dict(real))]


def rows(real: Tensors, config: dict[str, Any]) -> list[Shard]:
    """Two processes have the rows of every tensor, the first one at least as many as the second."""
    shards = [Shard(), Shard()]
    for name, whole in real.items():
        cut = -(-len(whole) // RANKS)
        for shard, (begin, end) in zip(shards, ((0, cut), (cut, len(whole))), strict=True):
            if end > begin:
                shard.put(name, (end - begin, *whole.shape[1:]), [(name, whole, begin, end - begin)])
    return shards


def megatron(real: Tensors, config: dict[str, Any]) -> list[Shard]:
    """Two ranks: q, k and v interleaved by query group, gate above up, padded vocabulary, columns of what goes out."""
    shards = [Shard(), Shard()]
    left = dict(real)
    for name in list(real):
        if name not in left:
            continue
        match = re.search(r"(q|gate)_proj\.(weight|bias)$", name)
        others = [name.replace(f"{match[1]}_proj", f"{each}_proj") for each in _WITH[match[1]]] if match else []
        if match and all(other in left for other in others):
            fuse = _qkv if match[1] == "q" else _gate_up
            for rank, shard in enumerate(shards):
                fuse(shard, rank, name, [(each, real[each]) for each in (name, *others)], config)
            for each in (name, *others):
                del left[each]
    for name, whole in left.items():
        for rank, shard in enumerate(shards):
            _alone(shard, rank, name, whole)
    return shards


_WITH = {"q": ("k", "v"), "gate": ("up",)}


def _qkv(shard: Shard, rank: int, name: str, parts: list[tuple[str, torch.Tensor]], config: dict[str, Any]) -> None:
    """Put the query groups of a rank one below the other; a rank without a group of its own has a copy of one."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = len(parts[0][1]) // heads
    mine = [g for g in range(groups) if g * RANKS // groups == rank] if groups >= RANKS else [rank * groups // RANKS]
    per_group = heads // max(groups, RANKS)
    found = []
    for position, group in enumerate(mine):
        first = group * per_group if groups >= RANKS else rank * heads // RANKS + position * per_group
        found.append((*parts[0], first * head, per_group * head))
        found += [(*part, group * head, head) for part in parts[1:]]
    _fused(shard, name.replace("q_proj", "linear_qkv"), found)


def _gate_up(shard: Shard, rank: int, name: str, parts: list[tuple[str, torch.Tensor]], config: dict[str, Any]) -> None:
    half = len(parts[0][1]) // RANKS
    _fused(shard, name.replace("gate_proj", "linear_fc1"), [(*part, rank * half, half) for part in parts])


def _fused(shard: Shard, name: str, parts: list[tuple[str, torch.Tensor, int, int]]) -> None:
    shard.put(name, (sum(part[3] for part in parts), *parts[0][1].shape[1:]), parts)


def _alone(shard: Shard, rank: int, name: str, whole: torch.Tensor) -> None:
    if name.endswith(COLUMNS):
        half = whole.shape[1] // RANKS
        shard.tensors[name] = whole[:, rank * half : (rank + 1) * half].clone()
        shard.boxes[name] = [Box(name, (0, rank * half), (len(whole), half), (0, 0))]
    elif "embed_tokens" in name or "lm_head" in name or "wte" in name:
        padded = -(-len(whole) // (_ROWS * RANKS)) * _ROWS
        begin = rank * padded
        there = max(0, min(padded, len(whole) - begin))
        shard.put(name, (padded, *whole.shape[1:]), [(name, whole, begin, there)])
    elif whole.dim() == 2 and len(whole) % RANKS == 0:
        half = len(whole) // RANKS
        shard.put(name, (half, *whole.shape[1:]), [(name, whole, rank * half, half)])
    else:
        shard.tensors[name] = whole.clone()  # norms, routers and the like are on every rank


@contextmanager
def sharded_training(address: str, checkpoint: Path, kind: str) -> Iterator[Callable[[Path, int], None]]:
    """Run the ranks of a trainer that holds version 1; yields how it publishes another checkpoint, in place."""
    config = json.loads((checkpoint / "config.json").read_text())
    shards = TRAINERS[kind](load_file(checkpoint / "model.safetensors"), config)
    workers = []
    with ExitStack() as stack:
        for number, shard in enumerate(shards):
            worker = connect(address, model="policy", replica="trainer", shard=number, num_shards=len(shards))
            workers.append(stack.enter_context(worker))
            worker.register(shard.tensors, shard.boxes)
        for worker in workers:
            worker.publish(1)

        def publish(next_checkpoint: Path, version: int) -> None:
            for worker in workers:
                worker.unpublish(30.0)
            held = TRAINERS[kind](load_file(next_checkpoint / "model.safetensors"), config)
            for mine, new in zip(shards, held, strict=True):
                for name, tensor in new.tensors.items():
                    mine.tensors[name].copy_(tensor)
            for worker in workers:
                worker.publish(version)

        yield publish


TRAINERS: dict[str, Callable[[Tensors, dict[str, Any]], list[Shard]]] = {
    "plain": plain,
    "rows": rows,
    "megatron": megatron,
}
