"""A replica that holds what an engine holds, in the engine's own layout, in plain memory of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from tensorhub_core import Worker, connect
from tensorhub_core.client.observer import observe


class Mirror:
    """One worker per shard; `tensors[shard]` is its memory."""

    def __init__(self, workers: list[Worker], tensors: list[dict[str, torch.Tensor]]) -> None:
        self.workers, self.tensors = workers, tensors

    def publish(self, version: int, *, broken: int | None = None) -> None:
        """Publish what the memory holds as a new version; the bytes of shard `broken` change before it is whole."""
        for worker in self.workers:
            worker.unpublish(30.0)
        for shard in sorted(range(len(self.workers)), key=lambda shard: shard != broken):
            self.workers[shard].publish(version)
            if shard == broken:
                self.flip(shard)

    def flip(self, shard: int) -> None:
        """Change one bit of one shard's published memory."""
        name = max(self.tensors[shard], key=lambda name: self.tensors[shard][name].nbytes)
        self.tensors[shard][name].view(torch.uint8).view(-1)[7] ^= 1


@contextmanager
def mirroring(address: str, replica: str) -> Iterator[Mirror]:
    """Copy what `replica` of the model `policy` holds, shard by shard."""
    with observe(address, model="policy") as observer:
        _, held = observer.holders()
    layouts = sorted((row.shard, row.layout) for row in held if row.replica == replica)
    with ExitStack() as stack:
        workers, tensors = [], []
        for shard, layout in layouts:
            memory = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layout.tensors}
            boxes = {spec.name: spec.boxes for spec in layout.tensors if spec.boxes is not None}
            worker = connect(address, model="policy", replica="mirror", shard=shard, num_shards=len(layouts))
            stack.enter_context(worker)
            worker.register(memory, boxes)
            workers.append(worker)
            tensors.append(memory)
        threads = [threading.Thread(target=worker.replicate, args=("latest", 60.0)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(worker.version is not None for worker in workers)
        yield Mirror(workers, tensors)
