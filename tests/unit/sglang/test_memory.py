"""A rank's memory is what its model computes with; processing that would change it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tensorhub_core.errors import ConfigError
from tensorhub_sglang import compat
from tensorhub_sglang.memory import LoadedWeights

CPU = torch.device("cpu")


class Model(nn.Module):
    """One layer that derives something from its weight, and an output layer tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3, bias=False)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.inner.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.halves = torch.zeros(0)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy what comes."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)


@contextlib.contextmanager
def loading(dtype: torch.dtype) -> Iterator[None]:
    """Stand in for SGLang's context of loading."""
    with torch.no_grad():
        yield


Memory = Callable[[Callable[[Model], None]], tuple[Model, LoadedWeights]]


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Return a model's memory, processed by a function instead of SGLang."""

    def make(process: Callable[[Model], None]) -> tuple[Model, LoadedWeights]:
        monkeypatch.setattr(compat, "loading", loading)
        monkeypatch.setattr(compat, "begin_loading", lambda model, device: None)
        monkeypatch.setattr(compat, "process", lambda model, device: process(model))
        model = Model()
        return model, LoadedWeights(model, "key", torch.float32, CPU)

    return make


def derive(model: Model) -> None:
    """Derive like MLA: neither a parameter nor a buffer."""
    model.halves = model.inner.weight.reshape(2, 6).clone()


def test_loading_fills_parameters_and_persistent_buffers_tied_ones_once(memory_of: Memory) -> None:
    model, memory = memory_of(derive)
    assert sorted(memory.parameters()) == ["inner.weight", "kept"]
    assert memory.parameters()["inner.weight"] is model.inner.weight
    assert list(memory.missing(["inner.weight", "kept"])) == ["inner.weight"]


def test_what_is_derived_from_weights_follows_each_fill(memory_of: Memory) -> None:
    model, memory = memory_of(derive)
    for value in (1.0, 2.0):
        memory.load(iter([("inner.weight", torch.full((3, 4), value))]))
        memory.process()
        assert torch.equal(model.halves, torch.full((2, 6), value))


def shuffle(model: Model) -> None:
    """Rewrite the weight in place, as kernels that want another order of rows do."""
    model.inner.weight.data[[0, 1]] = model.inner.weight.data[[1, 0]]


def pack(model: Model) -> None:
    """Give the parameter other memory."""
    model.inner.weight.data = model.inner.weight.data.t().contiguous()


def exchange(model: Model) -> None:
    """Put another parameter in its place."""
    model.inner.weight = nn.Parameter(model.inner.weight.detach().clone())


def fill_kept(model: Model) -> None:
    """Write a persistent buffer."""
    model.kept.fill_(3.0)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("process", "name"),
    [(shuffle, "inner.weight"), (pack, "inner.weight"), (exchange, "inner.weight"), (fill_kept, "kept")],
)
def test_processing_that_changes_the_weights_is_refused(
    memory_of: Memory, process: Callable[[Model], None], name: str
) -> None:
    _, memory = memory_of(process)
    with pytest.raises(ConfigError, match=f"SGLang changes {name} for the kernels"):
        memory.process()


def test_a_derived_view_of_the_weight_itself_is_no_change(memory_of: Memory) -> None:
    def alias(model: Model) -> None:
        half = model.inner.weight.data.view(3, 4)
        model.halves = model.halves.copy_(half) if model.halves.numel() else half

    model, memory = memory_of(alias)
    memory.process()
    memory.process()
    assert model.halves.data_ptr() == model.inner.weight.data_ptr()


def test_weights_elsewhere_are_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigError, match="not on cpu cannot be filled from a hub: weight, bias"):
        LoadedWeights(model, "key", torch.float32, CPU)
