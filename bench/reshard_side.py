"""One rank of the reshard bench, of the trainer or of the engine; what `remote.Remote("reshard_side.py")` starts."""

from __future__ import annotations

import resource
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gathering import Gathering, join
from layouts import ModelShape, layouts_of
from numpy.typing import NDArray
from remote import Say, answer

from tensorhub_core import Worker, connect
from tensorhub_core.layout.types import Box, Layout, TensorSpec

TIMEOUT_S = 100.0
PATTERN = 999_983
"""Elements after which the contents repeat: a prime, so that what is misplaced by rows or segments differs."""

Array = NDArray[np.uint16]


def cpu_s() -> float:
    """Return the CPU seconds that this process has taken."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def contents(name: str, shape: tuple[int, ...]) -> Array:
    """Return what a logical tensor holds, u16 [shape]; every process makes the same."""
    block = np.random.default_rng(3).integers(0, 1 << 16, PATTERN, np.uint16)
    begin = zlib.crc32(name.encode()) % PATTERN
    return np.resize(np.roll(block, -begin), shape)


class Memory:
    """What one rank holds: an allocation for each tensor, filled with its part of the model or with zeros."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.arrays: dict[str, Array] = {spec.name: np.zeros(spec.shape, np.uint16) for spec in layout.tensors}

    def fill(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Write the model's part."""
        for spec, box, part in self._parts(shapes):
            view_of(self.arrays[spec.name], box)[...] = part

    def wrong(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return how many boxes do not hold the model's part."""
        return sum(
            not np.array_equal(view_of(self.arrays[spec.name], box), part) for spec, box, part in self._parts(shapes)
        )

    def blank(self) -> None:
        """Overwrite everything."""
        for array in self.arrays.values():
            array[...] = 0

    def tensors(self) -> dict[str, Any]:
        """Return torch tensors on the arrays, of the layout's type."""
        import torch

        return {
            spec.name: torch.from_numpy(self.arrays[spec.name].view(np.int16)).view(getattr(torch, spec.dtype))
            for spec in self.layout.tensors
        }

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """Return the boxes by tensor."""
        return {spec.name: spec.boxes for spec in self.layout.tensors if spec.boxes is not None}

    def _parts(self, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[TensorSpec, Box, Array]]:
        found = []
        for spec in self.layout.tensors:
            for box in spec.boxes or ():
                whole = contents(box.logical, shapes[box.logical])
                place = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
                found.append((spec, box, whole[place]))
        return found


def view_of(array: Array, box: Box) -> Array:
    """Return a box's place in a physical tensor, u16 [shape of the box]."""
    return array[tuple(slice(at, at + size) for at, size in zip(box.local_offset, box.shape, strict=True))]


class Side:
    """Carries out the driver's commands."""

    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}
        self._workers: dict[str, Worker] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._gathering: Gathering | None = None

    def commands(self) -> Mapping[str, Callable[..., Any]]:
        """Return them by name."""
        names = ("hold", "connect", "publish", "update", "cpu", "wrong", "blank", "join", "gather", "close")
        return {name: getattr(self, name) for name in names}

    def hold(self, model: Mapping[str, Any], kind: str, rank: int, filled: bool) -> None:
        """Hold what one rank of a layout holds; replaces what was held as `kind`."""
        import torch

        torch.set_num_threads(1)
        self._shapes, layouts = layouts_of(ModelShape(**model), kind)
        memory = self._memories[kind] = Memory(layouts[rank])
        if filled:
            memory.fill(self._shapes)

    def connect(self, key: str, kind: str, server: str, replica: str, transport: str) -> None:
        """Register what is held as `kind` with the hub, as the model `key`."""
        memory = self._memories[kind]
        layout = memory.layout
        about = {"shard": layout.shard, "num_shards": layout.num_shards, "transport": transport}
        settings = {"handover_s": 0, "offload_limit_bytes": 0}
        worker = connect(server, model=key, replica=replica, settings=settings, **about)
        worker.register(memory.tensors(), boxes=memory.boxes())
        self._workers[key] = worker

    def publish(self, key: str, version: int) -> None:
        """Take the last version back and publish the next."""
        worker = self._workers[key]
        if worker.version is not None:
            worker.unpublish(TIMEOUT_S)
        worker.publish(version)

    def update(self, key: str, version: int) -> tuple[float, float]:
        """Fill the memory with a version; return when that began and ended, on the system's clock."""
        began = time.monotonic()
        self._workers[key].replicate(version, timeout_s=TIMEOUT_S, publish=False)
        return began, time.monotonic()

    def cpu(self) -> float:
        """Return the CPU seconds so far."""
        return cpu_s()

    def wrong(self, kind: str) -> int:
        """Return how many boxes of what is held do not have the model's numbers."""
        return self._memories[kind].wrong(self._shapes)

    def blank(self, kind: str) -> None:
        """Overwrite what is held."""
        self._memories[kind].blank()

    def join(self, model: Mapping[str, Any], kinds: Sequence[str], rank: int, port: int) -> None:
        """Make gloo's process group of all ranks of both layouts, the trainer's first."""
        trainers, engines = (layouts_of(ModelShape(**model), kind)[1] for kind in kinds)
        join(rank, len(trainers) + len(engines), port)
        mine = self._memories[kinds[0] if rank < len(trainers) else kinds[1]]
        self._gathering = Gathering(self._shapes, trainers, engines, rank, mine.tensors())

    def gather(self) -> tuple[float, float]:
        """Gather and broadcast everything once; return when that began and ended."""
        assert self._gathering is not None
        return self._gathering.run()

    def close(self) -> None:
        """Leave the hub."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def main() -> None:
    """Serve commands until the input ends."""

    def begin(say: Say) -> Mapping[str, Callable[..., Any]]:
        return Side().commands()

    answer(begin)


if __name__ == "__main__":
    main()
