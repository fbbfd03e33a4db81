"""Hold a whole copy of a version's tensors for a moment: for engines whose loading computes what it stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from tensorhub_core.client.versions import Version
from tensorhub_core.client.worker import Worker
from tensorhub_core.engine.logical import LogicalTensor

Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Staging:
    """Connect a second worker for each fill; all ranks of an engine stage together, so that they get one version."""

    connect: Callable[[], Worker]
    sources: Sequence[LogicalTensor]

    @contextmanager
    def replicate(
        self, version: int | Literal["latest"], timeout_s: float | None, progress: Callable[[int, int, str], None]
    ) -> Iterator[tuple[Version, str, Weights]]:
        """Fetch a version into host memory; yield it, the digest of its bytes and (name, tensor) pairs.

        The memory is given back at the end of the block. Raises what replicate() raises.
        """
        with self.connect() as worker:
            weights = [
                (source.name, torch.empty(source.shape, dtype=getattr(torch, source.dtype))) for source in self.sources
            ]
            worker.register(weights)
            got = worker.replicate(version, timeout_s, progress, publish=False)
            digest = worker.digest
            yield got, "" if digest is None else digest.hex(), weights
