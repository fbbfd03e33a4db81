"""An engine's ranks that read what a trainer publishes: workers in this process, with memory of given layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
import torch

from tensorhub_core import connect
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.types import Layout, TensorSpec
from tests.property.layout.world import SENTINEL, expected

from .engine_layouts import Shape
from .reference import Array

TIMEOUT_S = 30.0


class Engine:
    """One replica; each of its shards is a worker that holds one layout."""

    def __init__(self, address: str, layouts: Sequence[Layout], replica: str = "engine", model: str = "m") -> None:
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(len(layouts)))
        self._layouts = layouts
        self.memory = [
            {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layout.tensors}
            for layout in layouts
        ]
        for tensors in self.memory:
            for tensor in tensors.values():
                _bytes(tensor).fill_(SENTINEL)
        self.workers = [
            self._stack.enter_context(
                connect(
                    address,
                    model=model,
                    replica=replica,
                    shard=layout.shard,
                    num_shards=layout.num_shards,
                    settings={"handover_s": 0.5},  # who leaves last has nobody to hand over to
                )
            )
            for layout in layouts
        ]
        for worker, tensors, layout in zip(self.workers, self.memory, layouts, strict=True):
            worker.register(tensors, {spec.name: spec.boxes for spec in layout.tensors if spec.boxes is not None})

    def update(self, version: int | str = "latest", **how: Any) -> int:
        """Take a version on all shards; return which."""
        taken = set(self._pool.map(lambda worker: worker.update(version, timeout_s=TIMEOUT_S, **how), self.workers))
        assert len(taken) == 1
        return int(taken.pop())

    def follow(self, last: int) -> dict[int, list[list[Array]]]:
        """Take whatever is newest until version `last`; return copies of the memory, by shard, at each version."""
        found: dict[int, list[list[Array]]] = {}
        version = -1
        while version < last:
            self.workers[0].wait(newer_than=version if version >= 0 else None, timeout_s=TIMEOUT_S)
            version = self.update()
            found[version] = [[_bytes(tensor).numpy().copy() for tensor in tensors.values()] for tensors in self.memory]
        return found

    def put(self, memory: list[list[Array]]) -> None:
        """Put such a copy into the memory again."""
        for tensors, copies in zip(self.memory, memory, strict=True):
            for tensor, copy in zip(tensors.values(), copies, strict=True):
                _bytes(tensor).copy_(torch.from_numpy(copy))

    def require(self, truth: dict[str, Array]) -> None:
        """Fail unless the memory holds what gathering and slicing gives."""
        wholes = {name: array.view(np.uint8).reshape(*array.shape, -1) for name, array in truth.items()}
        for layout, tensors in zip(self._layouts, self.memory, strict=True):
            for group, want in zip(layout.storages, expected(layout, wholes), strict=True):
                name = layout.tensors[group[0]].name
                assert np.array_equal(_bytes(tensors[name]).numpy(), want.reshape(-1)), (layout.shard, name)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def whole_layout(shapes: dict[str, Shape], dtype: str) -> Layout:
    """Return the layout of somebody who holds every logical tensor under its own name."""
    return build_layout([TensorSpec(name, dtype, shape) for name, shape in shapes.items()], shard=0, num_shards=1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory, u8 [bytes]."""
    return tensor.view(-1).view(torch.uint8)
