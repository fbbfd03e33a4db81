"""The usual way to bring a trainer's weights to engines: gather full tensors, broadcast them, and let each rank slice.

Ranks that divide the same tensors gather each of them with `all_gather`; the first of them puts the named, full tensors
together and broadcasts them, one after the other, to all ranks of the engine, which copy what they need.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorhub_core.layout.types import Box, Layout

Shapes = Mapping[str, tuple[int, ...]]


def join(rank: int, world: int, port: int) -> None:
    """Make the process group, once for the life of a process: all ranks call it at once."""
    import torch.distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    url = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=world)


class Gathering:
    """One rank's part; ranks are the trainer's, then the engine's."""

    def __init__(
        self, shapes: Shapes, trainers: Sequence[Layout], engines: Sequence[Layout], rank: int, tensors: dict[str, Any]
    ) -> None:
        """Make the groups; every rank calls it at once."""
        import torch.distributed

        self._torch, self._distributed = torch, torch.distributed
        # Of which there are two names; the list form of it copies everything once more.
        self._gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
        self._shapes, self._trainers, self._rank, self._tensors = shapes, trainers, rank, tensors
        self._engine = engines[rank - len(trainers)] if rank >= len(trainers) else None
        ranks = list(range(len(trainers), len(trainers) + len(engines)))
        self._teams = teams_of(trainers)
        self._groups = [
            (torch.distributed.new_group(team), torch.distributed.new_group([team[0], *ranks])) for team in self._teams
        ]
        # Allocated once: to fault the pages in for every tensor costs more than to move it.
        self._scratch: dict[str, Any] = {}
        self._wanted: dict[str, list[tuple[Any, Box]]] = {}
        for spec in self._engine.tensors if self._engine is not None else ():
            for box in spec.boxes or ():
                self._wanted.setdefault(box.logical, []).append((tensors[spec.name], box))

    def run(self) -> tuple[float, float]:
        """Gather, broadcast and slice everything once; return when that began and ended."""
        self._distributed.barrier()
        began = time.monotonic()
        for team, (inner, outer) in zip(self._teams, self._groups, strict=True):
            if self._rank in team or self._engine is not None:
                self._bring(team, inner, outer)
        return began, time.monotonic()

    def _bring(self, team: Sequence[int], inner: Any, outer: Any) -> None:
        layouts = [self._trainers[rank] for rank in team]
        for position, name in enumerate(spec.name for spec in layouts[0].tensors):
            boxes = [layout.tensors[position].boxes or () for layout in layouts]
            parts: list[Any] = []
            if self._rank in team:
                parts = self._gathered(name, boxes, inner)
            if self._rank == team[0] or self._engine is not None:
                for logical in dict.fromkeys(box.logical for box in boxes[0]):
                    self._broadcast(logical, parts, boxes, team[0], outer)

    def _gathered(self, name: str, boxes: Sequence[Sequence[Box]], group: Any) -> list[Any]:
        """Return all ranks' parts of a physical tensor; what every rank has in full is not gathered."""
        mine = self._tensors[name]
        if all(each == boxes[0] for each in boxes):
            return [mine]
        parts = self._buffer("parts", (len(boxes), *mine.shape), mine.dtype)
        self._gather(_raw(parts), _raw(mine), group=group)
        return list(parts)

    def _buffer(self, key: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return memory of this shape that is used again for the next tensor."""
        count, kept = math.prod(shape), self._scratch.get(key)
        if kept is None or len(kept) < count or kept.dtype != dtype:
            kept = self._scratch[key] = self._torch.zeros(count, dtype=dtype)
        return kept[:count].view(shape)

    def _broadcast(
        self, logical: str, parts: Sequence[Any], boxes: Sequence[Sequence[Box]], root: int, group: Any
    ) -> None:
        like = next(iter(self._tensors.values()))
        full = self._buffer("full", self._shapes[logical], like.dtype)
        for part, mine in zip(parts, boxes, strict=False):
            for box in mine:
                if box.logical == logical:
                    full[_at(box.offset, box.shape)].copy_(part[_at(box.local_offset, box.shape)])
        self._distributed.broadcast(_raw(full), root, group=group)
        for tensor, box in self._wanted.get(logical, ()):
            tensor[_at(box.local_offset, box.shape)].copy_(full[_at(box.offset, box.shape)])


def teams_of(trainers: Sequence[Layout]) -> list[list[int]]:
    """Return the ranks that divide the same tensors: those that hold parts of the same names."""
    teams: dict[frozenset[str], list[int]] = {}
    for rank, layout in enumerate(trainers):
        teams.setdefault(frozenset(_logicals(layout)), []).append(rank)
    return list(teams.values())


def _logicals(layout: Layout) -> Iterator[str]:
    return (box.logical for spec in layout.tensors for box in spec.boxes or ())


def _at(begin: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))


def _raw(tensor: Any) -> Any:
    import torch

    return tensor.view(-1).view(torch.uint8)
