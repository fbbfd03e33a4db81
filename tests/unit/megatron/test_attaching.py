"""What a Megatron rank registers: its parameters themselves, and of buffers a copy for each version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensorhub_core.errors import ConfigError
from tensorhub_core.layout.types import Box
from tensorhub_megatron import attaching
from tensorhub_megatron.agreement import Alone
from tensorhub_megatron.attaching import MegatronWeights
from tensorhub_megatron.layout import Described


class Router(torch.nn.Module):
    """A parameter, and a buffer that is updated by what the forward pass counted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4, 3))
        self.register_buffer("expert_bias", torch.zeros(4))
        self.config = object()

    def sharded_state_dict(self) -> dict[str, torch.Tensor]:
        return {}


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    def describe(chunks: list[Router], hf_config: Any, *, extra_names: Any) -> Described:
        tensors: dict[str, Any] = {"weight": chunks[0].weight, "bias": chunks[0].expert_bias}
        boxes = {name: (Box(name, (0,) * t.dim(), tuple(t.shape), (0,) * t.dim()),) for name, t in tensors.items()}
        return Described(tensors, boxes, tensors, {name: tensor.data_ptr() for name, tensor in tensors.items()})

    monkeypatch.setattr(attaching, "describe", describe)
    return Router()


def test_a_buffer_is_published_as_it_was_when_the_step_ended(router: Router) -> None:
    weights = MegatronWeights([router])
    weights.refresh()
    registered = weights.describe()
    assert registered.tensors["weight"] is router.weight
    copy = registered.tensors["bias"]
    router.expert_bias.add_(1)  # the backward pass has ended, readers are still there
    assert copy.tolist() == [0] * 4
    assert not weights.moved()
    # The same version registered anew, as after offloading, has the same bytes.
    assert weights.describe().tensors["bias"].tolist() == [0] * 4
    weights.refresh()
    assert copy.tolist() == [1] * 4


def test_a_buffer_that_was_exchanged_is_described_anew(router: Router) -> None:
    weights = MegatronWeights([router])
    weights.describe()
    router.expert_bias = torch.full((4,), 5.0)
    weights.refresh()
    assert weights.moved()
    assert weights.describe().tensors["bias"].tolist() == [5] * 4
    assert not weights.moved()


def test_a_parameter_that_was_given_other_memory_is_noticed(router: Router) -> None:
    weights = MegatronWeights([router])
    assert weights.moved()
    weights.describe()
    assert not weights.moved()
    router.weight.data = router.weight.data.clone()
    assert weights.moved()


class OtherMachine(Alone):
    """A rank whose peer is on a machine with another name."""

    size = 2

    def highest(self, value: int) -> int:
        return max(value, value + 1)


@pytest.mark.parametrize("server", [None, "tcp://10.0.0.1:7077"])
def test_ranks_on_several_machines_have_to_name_the_hub(server: str | None) -> None:
    attaching._require_one_hub(Alone(), server)
    with pytest.raises(ConfigError, match="name it on all ranks"):
        attaching._require_one_hub(OtherMachine(), server)
