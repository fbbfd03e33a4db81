"""A worker that remembers, weights that stay where they are, and an optimizer like Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tensorhub_core.errors import DeadlineExceeded
from tensorhub_megatron import Publisher
from tensorhub_megatron.publication import Publication, Registration


class RecordingWorker:
    """Remembers each call, and at each publish what a reader would see."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.events: list[str] = []
        self.seen: dict[int, dict[str, torch.Tensor]] = {}
        self.published = False
        self.readers = 0
        self.registrations = 0
        self.waits: list[float] = []
        self.now = 100.0

    def register(self, tensors: Any, boxes: Any = None) -> None:
        assert not self.published
        assert tensors.keys() == self.tensors.keys()
        self.registrations += 1

    def publish(self, version: int) -> None:
        assert not self.published
        self.published = True
        self.events.append(f"publish {version}")
        self.seen[version] = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def unpublish(self, timeout_s: float | None = None) -> None:
        assert self.published
        if self.readers:
            self.waits.append(timeout_s or 0.0)
            self.now += timeout_s or 0.0
            raise DeadlineExceeded(f"{self.readers} readers after {timeout_s} s")
        self.published = False
        self.events.append("unpublish")

    def close(self) -> None:
        self.events.append("close")

    def monotonic(self) -> float:
        """Return the time, which passes while readers are waited for."""
        return self.now


class PlainWeights:
    """Weights that stay where they are."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def refresh(self) -> None:
        pass

    def describe(self) -> Registration:
        return Registration(self.tensors)

    def moved(self) -> bool:
        return False


def follow(worker: RecordingWorker, optimizer: Any, **how: Any) -> Publisher:
    publication = Publication(PlainWeights(worker.tensors), **how)
    publication.open(lambda: worker)
    return Publisher(publication, optimizer)


class MegatronLikeOptimizer:
    """No torch optimizer: `step` returns (success, gradient norm, zeros), as Megatron's does."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        self.overflow = False

    def step(self) -> tuple[bool, float, int]:
        if self.overflow:
            return False, float("inf"), 0
        self.inner.step()
        return True, 1.0, 0


def backward(model: torch.nn.Module) -> None:
    """Give a model of four inputs gradients."""
    model.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
