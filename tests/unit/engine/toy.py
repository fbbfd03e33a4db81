"""A toy engine: two fused projections and a norm, whose processing doubles what it computes with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tensorhub_core import Worker, connect
from tensorhub_core.client.observer import observe
from tensorhub_core.client.piecewise_round import PieceReader, connect_piecewise
from tensorhub_core.engine.fit import fit
from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.staging import Staging
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport

NAMES = ("q", "k", "norm")


@dataclass
class Hub:
    """A server, and a data plane inside this process."""

    address: str
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    transport: str = ""
    """A data plane by name instead, which staging needs."""
    staging_bytes: int | None = None

    def connect(self, replica: str | None = None) -> Worker:
        """Connect the only shard of a replica."""
        transport = self.transport or MemoryTransport(self.network)
        return connect(self.address, model="policy", replica=replica, transport=transport)

    def connect_piecewise(self, replica: str) -> PieceReader:
        """Connect the only shard of a replica that lets versions pass through."""
        settings = {"staging_bytes": self.staging_bytes}
        transport = self.transport or MemoryTransport(self.network)
        return connect_piecewise(self.address, model="policy", replica=replica, transport=transport, settings=settings)


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return a version's tensors by logical name."""
    drawn = torch.Generator().manual_seed(version)
    shapes = {"q": (6, 8), "k": (4, 8), "norm": (8,)}
    return {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}


class ToyMemory:
    """`live` is what the toy computes with; `in_place`: processing rewrites the loaded memory itself."""

    key = "toy"

    def __init__(self, *, in_place: bool = False, computes: bool = False) -> None:
        self.in_place, self.computes = in_place, computes
        self.loaded = {"qk": torch.zeros(10, 8), "norm": torch.zeros(8)}
        self.live: dict[str, torch.Tensor] = {}
        self.fails = False
        self.loading: Callable[[str], None] = lambda name: None

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self.loaded

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> object:
        for name, tensor in pairs:
            if name not in NAMES:
                raise KeyError(name)
            self.loading(name)
            if self.computes:
                tensor = tensor * 1
            target = {"q": self.loaded["qk"][:6], "k": self.loaded["qk"][6:], "norm": self.loaded["norm"]}[name]
            assert target.shape == tensor.shape, f"{name} must be {tuple(target.shape)}"
            target.copy_(tensor)
        return None

    def missing(self, untouched: Sequence[str]) -> Sequence[str]:
        return untouched

    def process(self) -> None:
        if self.fails:
            raise RuntimeError("the kernel could not be made")
        if self.in_place:
            for tensor in self.loaded.values():
                tensor.mul_(2)
        self.live = self.loaded if self.in_place else {name: tensor * 2 for name, tensor in self.loaded.items()}

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        yield

    def computes_with(self, version: int) -> bool:
        """Tell whether the toy computes with exactly this version."""
        real = weights(version)
        expected = {"qk": torch.cat([real["q"], real["k"]]) * 2, "norm": real["norm"] * 2}
        return all(torch.equal(self.live[name], tensor) for name, tensor in expected.items())


@contextlib.contextmanager
def shard_of(hub: Hub, memory: ToyMemory, replica: str = "engine") -> Iterator[EngineShard]:
    """Connect a toy engine's only rank and register its memory, described by what is held now."""
    with observe(hub.address, model="policy") as observer:
        _, held = observer.holders()
    described = fit(memory, held)
    staging = None
    if described.streamed:
        staging = Staging(lambda: hub.connect_piecewise(f"{replica}/staging"), described.sources)
    shard = EngineShard(memory, hub.connect(replica), described, staging, 0, 5.0, lambda text: None, time.monotonic)
    try:
        shard.register()
        yield shard
    finally:
        shard.close()
