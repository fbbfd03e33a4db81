"""Trainers and readers of versions that pass through bounded memory, in one process over a real server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorhub_core import Worker, connect, serve
from tensorhub_core.client.piecewise_round import PieceReader, connect_piecewise
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.layout.types import Box
from tensorhub_core.server.serving import Server
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport

Arrays = dict[str, np.ndarray[Any, Any]]
QUICK = {"segment_bytes": 4096, "close_timeout_s": 1.0, "handover_s": 0.1}
LIMIT = 40_000
"""Two portions of 20,000 bytes at a time: the tensors below make several, and one is larger than all of it."""


def weights(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    made: Arrays = {f"layer.{n}.weight": rng.random((60, 50), np.float32) for n in range(8)}
    made |= {"big": rng.random((110, 125), np.float32), "bias": rng.random(7), "none": np.zeros((0, 4), np.float32)}
    return {**made, "scale": np.array(rng.random(), np.float32)}


def described(tensors: Arrays) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()]


@dataclass
class Here:
    server: Server
    stack: contextlib.ExitStack
    network: MemoryNetwork = field(default_factory=MemoryNetwork)

    def trainer(self, tensors: Arrays, version: int = 1, replica: str = "trainer", **more: Any) -> Worker:
        boxes = more.pop("boxes", None)
        transport = MemoryTransport(self.network)
        worker = connect(
            self.server.address, model="policy", replica=replica, transport=transport, settings=QUICK, **more
        )
        self.stack.enter_context(worker)
        worker.register(tensors, boxes)
        worker.publish(version)
        return worker

    def halves(self, tensors: Arrays, version: int = 1, replica: str = "halves") -> list[Worker]:
        """Publish each tensor cut in two along its first axis; what cannot be cut belongs to the first shard."""
        made = []
        for shard in range(2):
            mine, boxes = {}, {}
            for name, tensor in tensors.items():
                if not tensor.size or not tensor.shape:
                    if not shard:
                        mine[name] = tensor
                    continue
                cut = len(tensor) // 2
                begin, end = (0, cut) if not shard else (cut, len(tensor))
                mine[name] = tensor[begin:end]
                origin = (0,) * (tensor.ndim - 1)
                boxes[name] = [Box(name, (begin, *origin), mine[name].shape, (0, *origin))]
            made.append(self.trainer(mine, version, replica, boxes=boxes, shard=shard, num_shards=2))
        return made

    def fused(self, tensors: Arrays, version: int = 1) -> Worker:
        """Publish all layers as one tensor, so that a segment has parts of several of them."""
        layers = [name for name in tensors if name.startswith("layer")]
        rest = {name: tensor for name, tensor in tensors.items() if name not in layers}
        boxes = [Box(name, (0, 0), (60, 50), (60 * n, 0)) for n, name in enumerate(layers)]
        stacked = np.concatenate([tensors[name] for name in layers])
        return self.trainer({**rest, "fused": stacked}, version, "fused", boxes={"fused": boxes})

    def reader(self, shard: int = 0, num_shards: int = 1, **settings: Any) -> PieceReader:
        worker = connect_piecewise(
            self.server.address,
            model="policy",
            replica="engine/staging",
            shard=shard,
            num_shards=num_shards,
            transport=MemoryTransport(self.network),
            settings={**QUICK, "staging_bytes": LIMIT, **settings},
        )
        return self.stack.enter_context(worker)


@contextlib.contextmanager
def world() -> Iterator[Here]:
    """Run a server for the block."""
    with contextlib.ExitStack() as stack:
        here = Here(run_server("tcp://127.0.0.1:0"), stack)
        stack.callback(lambda: here.server.close())
        with contextlib.ExitStack() as here.stack:
            yield here


def run_server(address: str) -> Server:
    return serve(address, lease_s=1.0, heartbeat_s=0.1, settings={"retain": 0})


class Loader:
    """Copies what comes; `before(name)` is called before each tensor is taken."""

    def __init__(self, before: Callable[[str], None] = lambda name: None) -> None:
        self.before, self.got, self.calls = before, Arrays(), 0

    def __call__(self, tensors: Iterable[RawTensor]) -> None:
        self.calls += 1
        self.got = {}
        for tensor in tensors:
            self.before(tensor.name)
            self.got[tensor.name] = tensor.buffer.copy()

    def has(self, tensors: Arrays) -> bool:
        return {name: data.tobytes() for name, data in self.got.items()} == {n: t.tobytes() for n, t in tensors.items()}


def passed(reader: PieceReader, tensors: Arrays, loader: Loader, version: int | str = "latest") -> tuple[int, bytes]:
    with reader.passing(described(tensors), version, 20.0) as passing:
        assert passing.begins()
        return passing.use(loader)
