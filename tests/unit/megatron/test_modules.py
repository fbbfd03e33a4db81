"""Parameters are named as the model inside of its wrappers names them, whatever the user calls his own modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tensorhub_core.errors import ConfigError, RegistrationError
from tensorhub_megatron import attach_fsdp, attach_optimizer, parameters_of
from tensorhub_megatron.fsdp import ShardedWeights
from tensorhub_megatron.modules import named_weights, require_no_adapters
from tensorhub_megatron.publisher import ModuleWeights
from tensorhub_megatron.sharded import named_shards


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class OwnNames(nn.Module):
    """A model whose own modules have the names that wrappers give theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(2, 2, bias=False)})
        self._fsdp_wrapped_module = nn.Linear(2, 3)

    def reshard(self) -> None:
        raise AssertionError("this is the user's own method")

    def unshard(self) -> None:
        raise AssertionError("this is the user's own method")


def test_a_users_own_names_stay() -> None:
    model = OwnNames()
    own = dict(model.named_parameters())
    assert named_weights(model) == own
    assert set(named_shards(model)) == set(own)
    assert parameters_of(model) == own


def compiled(layer: nn.Module) -> Any:
    return torch.compile(layer)


def checkpointed(layer: nn.Module) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(layer)


def offloaded(layer: nn.Module) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    return offload_wrapper(layer)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": compiled,
    "checkpointed": checkpointed,
    "offloaded": offloaded,
    "replicated": nn.parallel.DistributedDataParallel,
    "on devices": nn.DataParallel,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("inner", WRAPPERS)
@pytest.mark.parametrize("outer", [*WRAPPERS, ""])
def test_wrappers_leave_no_trace_in_names(outer: str, inner: str) -> None:
    """At the root, inside, and around each other."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"module": nn.Linear(3, 3)}), nn.Linear(3, 2))
    plain = dict(model.named_parameters())
    model[1]["module"] = WRAPPERS[inner](model[1]["module"])
    model[2] = WRAPPERS[inner](model[2])
    whole = WRAPPERS[outer](model) if outer else model
    assert set(plain) != {name for name, _ in nn.Module.named_parameters(whole)}
    for found in (named_weights(whole), named_shards(whole), parameters_of(whole)):
        assert found.keys() == plain.keys()
        assert all(found[name] is plain[name] for name in plain)


def test_wrappers_that_come_and_go_move_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for weights in (ModuleWeights(model), ShardedWeights(model)):
        layer = model[1]
        registered = weights.describe().tensors
        assert set(registered) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        model[1] = checkpointed(compiled(layer))
        assert not weights.moved()
        model[1] = nn.Linear(2, 2)
        assert weights.moved()
        assert weights.describe().tensors["1.weight"] is model[1].weight
        model[1] = layer


def test_shared_parameters_and_modules_have_all_their_names() -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Sequential(shared), "d": nn.Linear(2, 2, bias=False)})
    model["d"].weight = shared.weight
    found = named_weights(model)
    assert list(found) == ["a.weight", "b.weight", "c.0.weight", "d.weight"]
    assert {id(parameter) for parameter in found.values()} == {id(shared.weight)}


def test_two_parameters_of_one_name_are_refused() -> None:
    wrapper = checkpointed(nn.Linear(2, 2))
    wrapper._parameters["weight"] = nn.Parameter(torch.ones(2))
    with pytest.raises(RegistrationError, match=r"two parameters would be published as 'layer\.weight'"):
        named_weights(nn.ModuleDict({"layer": wrapper}))


class LoraLinear(nn.Linear):
    """Parameters of an adapter beside the weight, as of loralib and torchtune."""

    def __init__(self, name: str) -> None:
        super().__init__(2, 2)
        self.register_parameter(name, nn.Parameter(torch.zeros(1, 2)))


class TunerLayer(nn.Module):
    """As peft's: the layer it wraps, and its own parts by the names that it lists."""

    adapter_layer_names = ("ia3_l",)

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.ones(2))})


class AdapterWrapper(nn.Module):
    """As Megatron-Bridge's."""

    def __init__(self) -> None:
        super().__init__()
        self.to_wrap = nn.Linear(2, 2)
        self.adapter = nn.Linear(2, 2)


def peft_model() -> Any:
    """Return a model of a class that peft's prompt tuning and unmerged models have."""
    kind = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model", "peft_config": {"default": object()}})
    return kind()


ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: LoraLinear("lora_A"),
    "torchtune": lambda: LoraLinear("lora_a"),
    "peft": TunerLayer,
    "bridge": AdapterWrapper,
    "peft model": peft_model,
}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("depth", [0, 2])
def test_adapters_are_refused_wherever_they_are(name: str, depth: int) -> None:
    model = ADAPTERS[name]()
    for _ in range(depth):
        model = nn.ModuleDict({"policy": model})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for act in (
        lambda: require_no_adapters(model),
        lambda: named_shards(model),
        lambda: parameters_of(model),
        lambda: attach_optimizer(model, optimizer, server="tcp://127.0.0.1:9"),
        lambda: attach_fsdp(model, optimizer, server="tcp://127.0.0.1:9"),
    ):
        with pytest.raises(RegistrationError, match=r"adapter.*merge"):
            act()


def test_an_adapter_that_is_put_in_later_is_refused_at_the_next_version() -> None:
    for kind in (ModuleWeights, ShardedWeights):
        model = nn.ModuleDict({"layer": nn.Linear(2, 2)})
        weights = kind(model)
        weights.describe()
        assert not weights.moved()
        model["layer"] = TunerLayer()
        with pytest.raises(RegistrationError, match="adapter"):
            weights.moved()


def test_what_was_merged_is_published() -> None:
    """Earlier releases of peft leave their configuration on the model that they give back."""
    merged = nn.Linear(2, 2)
    merged.peft_config = {"default": object()}
    assert set(parameters_of(merged)) == set(named_shards(merged)) == {"weight", "bias"}


def test_a_base_layer_of_the_users_own_is_no_adapter() -> None:
    model = nn.ModuleDict({"base_layer": nn.Linear(2, 2), "adapter": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert len(named_weights(model)) == 6


def test_engines_of_other_kinds_are_refused_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = type("DeepSpeedEngine", (nn.Module,), {})
    fake: Any = ModuleType("deepspeed.runtime.engine")
    fake.DeepSpeedEngine = engine
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    model = type("OurEngine", (engine,), {})()
    model.module = nn.Linear(2, 2)
    for act in (named_shards, parameters_of):
        with pytest.raises(RegistrationError, match="DeepSpeed"):
            act(model)


def test_ranks_parts_of_a_megatron_model_are_refused() -> None:
    """As whole tensors under names of their own, each rank's part would pass for the whole."""
    model = nn.Linear(2, 2)
    model.weight.tensor_model_parallel = True
    for act in (named_shards, parameters_of):
        with pytest.raises(RegistrationError, match=r"'weight'.*attach\(\)"):
            act(model)


@pytest.mark.parametrize("act", [named_shards, parameters_of])
def test_what_is_no_module_and_what_has_no_shape_yet_is_refused(act: Callable[[Any], Any]) -> None:
    for wrong in (None, nn.Linear(2, 2).state_dict(), nn.Linear(2, 2).parameters(), [nn.Linear(2, 2)], nn.Linear):
        with pytest.raises(RegistrationError, match=r"is no torch\.nn\.Module"):
            act(wrong)
    lazy = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(RegistrationError, match=r"'1\.weight' has no shape before its module's first forward pass"):
        act(lazy)
    lazy(torch.ones(1, 2))
    assert len(act(lazy)) == 4


def test_an_optimizer_that_was_not_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no step\(\) to follow"):
        attach_optimizer(nn.Linear(2, 2), torch.optim.SGD)
    assert not hasattr(torch.optim.SGD, "_tensorhub_publisher")
