"""What depends on the version of Megatron: where parameters lie in global tensors, what a model is made of.

Tested with megatron-core 0.16; 0.19 was seen to describe its models alike. Imports of Megatron are inside functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tensorhub_core.errors import RegistrationError
from tensorhub_megatron.hf_config import TrainerFacts
from tensorhub_megatron.names import Chunk, ModelDims

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """A part of a global tensor: `prepended` of its axes are not the local tensor's, where it begins at `local`."""

    key: str
    chunk: Chunk
    prepended: int
    local: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One parameter: its name in the model chunk, what to register (itself, or a view of it), what that holds."""

    name: str
    parameter: torch.Tensor
    tensor: torch.Tensor
    places: tuple[Place, ...]


def unwrap(chunk: Any) -> Any:
    """Return the model inside of DistributedDataParallel, Float16Module and the like; raises RegistrationError."""
    model = chunk
    while hasattr(model, "module") and not hasattr(model, "decoder"):
        model = model.module
    if not callable(getattr(model, "sharded_state_dict", None)) or not hasattr(model, "config"):
        raise RegistrationError(
            f"{type(model).__qualname__} is not a model of megatron-core: give what get_model() returned, or use "
            "attach_optimizer() or attach_fsdp()"
        )
    return model


def is_tied(model: Any) -> bool:
    """Tell whether the output layer uses the embedding's weights."""
    return bool(getattr(model, "share_embeddings_and_output_weights", False))


def model_dims(config: Any, vocab: int | None, model_type: str) -> ModelDims:
    """Return the dimensions that a TransformerConfig states."""
    heads = int(config.num_attention_heads)
    return ModelDims(
        heads=heads,
        groups=int(config.num_query_groups or heads),
        head_dim=int(config.kv_channels or config.hidden_size // heads),
        vocab=vocab,
        gated=bool(config.gated_linear_unit),
        model_type=model_type,
    )


def facts_of(config: Any, *, tied: bool) -> TrainerFacts:
    """Return what a TransformerConfig says about the model, for the comparison with a Hugging Face configuration."""
    experts = config.num_moe_experts
    pattern = config.moe_layer_freq
    has_dense = not experts or (0 in pattern if isinstance(pattern, list) else pattern != 1)
    heads = config.num_attention_heads
    return TrainerFacts(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=heads,
        groups=config.num_query_groups or heads,
        head_dim=config.kv_channels or config.hidden_size // heads,
        ffn=config.ffn_hidden_size if has_dense else None,
        experts=experts or None,
        expert_ffn=config.moe_ffn_hidden_size if experts else None,
        shared_ffn=config.moe_shared_expert_intermediate_size,
        tied=tied,
        qkv_bias=bool(config.add_qkv_bias or config.add_bias_linear),
        qk_norm=bool(config.qk_layernorm),
        zero_centered_norms=bool(config.layernorm_zero_centered_gamma),
        interleaved_rotary=bool(getattr(config, "rotary_interleaved", False)),
    )


def entries(model: Any) -> list[Entry]:
    """Return where the parameters of a model chunk lie in Megatron's global tensors; nothing is copied.

    Raises RegistrationError for one that Megatron rearranges or copies.
    """
    state = model.sharded_state_dict()
    live = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found = [entry for name, value in _flat(state) for entry in _entry(model, name, value)]
    copies = [entry.name for entry in found if id(entry.parameter) not in live]
    if copies:
        raise RegistrationError("Megatron's sharded_state_dict() gives copies of these: " + ", ".join(copies))
    return found


def lost(model: Any, found: Iterable[Entry]) -> list[str]:
    """Return the parameters of a model chunk of which Megatron does not tell where they lie."""
    placed = {id(entry.parameter) for entry in found}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in placed]


def _flat(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _flat(value, f"{name}.{number}")
    else:
        yield name, state


def _entry(model: Any, name: str, value: Any) -> Iterator[Entry]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(value, ShardedTensor) and value.data is not None:
        origin = (0,) * value.data.dim()
        yield Entry(name, value.data, value.data, (_place(value, origin),))
    elif isinstance(value, ShardedTensorFactory) and value.data is not None:
        yield from _factory_entry(model, name, value)


def _factory_entry(model: Any, name: str, factory: Any) -> Iterator[Entry]:
    """Let the factory divide a tensor without memory: what it makes of the real one might be a copy."""
    import torch

    parameter = factory.data
    experts = _experts_of(model, name)
    tensor = parameter if experts is None else _experts_view(experts, name, parameter)
    ghost = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    axis = max(0, tensor.dim() - 2)
    rows = 0
    places: list[Place] = []
    for _, part in _flat(replace(factory, data=ghost).build()):
        if not hasattr(part, "global_offset"):
            continue
        if experts is None and not _is_row_view(part.data, ghost, rows):
            raise RegistrationError(
                f"Megatron rearranges {name!r} for its checkpoints in a way that boxes do not describe: give its "
                "module's usual sharded_state_dict(), or convert the weights before they are published"
            )
        places.append(_place(part, tuple(rows if number == axis else 0 for number in range(tensor.dim()))))
        rows += part.local_shape[axis]
    if rows != tensor.shape[axis]:
        raise RegistrationError(f"Megatron describes {rows} of the {tensor.shape[axis]} rows of {name!r}")
    yield Entry(name, parameter, tensor, tuple(places))


def _is_row_view(part: torch.Tensor, whole: torch.Tensor, rows: int) -> bool:
    """Tell whether a part is some rows of the tensor as they lie there."""
    return (
        part.stride() == whole.stride()
        and part.shape[1:] == whole.shape[1:]
        and part.storage_offset() == rows * whole.stride(0)
    )


def _experts_of(model: Any, name: str) -> Any:
    """Return the module of grouped experts whose parameter this is, if it is one that stores them transposed."""
    try:
        from megatron.core.transformer.moe.experts import GroupedMLP
    except ImportError:  # gone from later releases
        return None
    module = model.get_submodule(name.rpartition(".")[0])
    return module if isinstance(module, GroupedMLP) else None


def _experts_view(experts: Any, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the experts [experts, rows, columns] of a transposed parameter, without a copy."""
    hidden, count = experts.config.hidden_size, experts.num_local_experts
    shape = (count, hidden, -1) if name.endswith("weight1") else (count, -1, hidden)
    return parameter.detach().view(shape).transpose(-1, -2)


def _place(value: Any, local: tuple[int, ...]) -> Place:
    prepended = int(value.prepend_axis_num)
    shape = (*(1 for _ in range(prepended)), *value.local_shape)
    chunk = Chunk(tuple(value.global_shape), tuple(value.global_offset), tuple(map(int, shape)))
    return Place(value.key, chunk, prepended, local)
