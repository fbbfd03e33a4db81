"""Read a Hugging Face configuration, and compare it with the trainer's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorhub_core.errors import ConfigError
from tensorhub_megatron.names import ModelDims

_BIASED = frozenset({"qwen2", "qwen2_moe"})
_NORMED = frozenset({"qwen3", "qwen3_moe"})
_BIASED_OUTPUT = _NORMED | {"llama"}
"""Families whose `attention_bias` means that of the output, too."""
_KNOWN = frozenset({"llama", "mistral", "mixtral"}) | _BIASED | _NORMED
"""Families whose tensors follow from the type: a tensor too many on the trainer's side would get lost unnoticed."""

_GEMMAS = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
_ZERO_CENTERED = _GEMMAS | {"nemotron", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Families whose own norms are smaller by one."""

REARRANGING = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size", "attention_output_gate")
"""Megatron's settings with which parameters do not hold the rows that Hugging Face tensors have."""


@dataclass(frozen=True)
class TrainerFacts:
    """What the trainer's configuration says; None where the model has no such part."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int | None
    experts: int | None
    expert_ffn: int | None
    shared_ffn: int | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    zero_centered_norms: bool | None
    interleaved_rotary: bool


def read_hf_config(hf_config: Any) -> dict[str, Any]:
    """Return the plain mapping of a configuration: of a transformers config, a mapping, or a folder or `config.json`.

    A text model inside a multimodal one counts. None makes an empty one. Raises ConfigError for anything else.
    """
    if hf_config is None:
        return {}
    if isinstance(hf_config, str | os.PathLike):
        found = _read_file(Path(hf_config))
    elif isinstance(hf_config, Mapping):
        found = dict(hf_config)
    elif callable(getattr(hf_config, "to_dict", None)):
        found = dict(hf_config.to_dict())
    else:
        kind = type(hf_config).__qualname__
        raise ConfigError(f"hf_config is a {kind}: give a transformers config, a mapping, or a folder with config.json")
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, Mapping) else found


def _read_file(path: Path) -> dict[str, Any]:
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"hf_config names {str(path)!r}, which has no readable config.json: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(file)!r} does not hold a model's configuration")
    return found


def dims_of(config: Mapping[str, Any]) -> ModelDims:
    """Return the dimensions of a model that only its Hugging Face configuration describes.

    Raises ConfigError naming all keys that are missing or impossible.
    """
    needed = ("vocab_size", "hidden_size", "num_attention_heads")
    wrong = [key for key in needed if not isinstance(config.get(key), int) or config[key] < 1]
    if wrong:
        raise ConfigError(f"the Hugging Face configuration lacks {', '.join(wrong)}")
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise ConfigError(f"{heads} attention heads cannot share {groups} key and value heads")
    return ModelDims(
        heads=heads,
        groups=groups,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        model_type=str(config.get("model_type") or ""),
    )


def value_of(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the first of several keys that has a value."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def rearranged(settings: Mapping[str, Any]) -> list[str]:
    """Return those of a trainer's settings with which rows cannot be told."""
    found = {name: settings.get(name) for name in REARRANGING}
    return [f"{name} = {value}: rows of such matrices cannot be told yet" for name, value in found.items() if value]


def differences(config: Mapping[str, Any], trainer: TrainerFacts) -> list[str]:
    """Return everything in which the trainer's model is not the one of a Hugging Face configuration.

    Only what the configuration states is compared.
    """
    mixtral = config.get("model_type") == "mixtral"
    found: list[str] = []
    for keys, has in (
        (("num_hidden_layers",), trainer.layers),
        (("hidden_size",), trainer.hidden),
        (("num_attention_heads",), trainer.heads),
        (("num_key_value_heads",), trainer.groups),
        (("head_dim",), trainer.head_dim),
        (("num_experts", "num_local_experts", "n_routed_experts"), trainer.experts or 0),
        (("intermediate_size",), trainer.expert_ffn if mixtral else trainer.ffn),
        (("moe_intermediate_size",), trainer.expert_ffn),
        (("shared_expert_intermediate_size",), trainer.shared_ffn or 0),
        (("tie_word_embeddings",), trainer.tied),
    ):
        wanted = value_of(config, *keys)
        if wanted is not None and has is not None and wanted != has:
            name = next(key for key in keys if config.get(key) is not None)
            found.append(f"{name}: the Hugging Face configuration has {wanted}, the trainer {has}")
    return found + _different_parts(config, trainer)


def _different_parts(config: Mapping[str, Any], trainer: TrainerFacts) -> list[str]:
    kind = str(config.get("model_type") or "")
    found: list[str] = []
    zero_centered = kind in _ZERO_CENTERED
    if trainer.zero_centered_norms is not None and trainer.zero_centered_norms != zero_centered:
        how = "larger" if zero_centered else "smaller"
        found.append(f"layernorm_zero_centered_gamma: the trainer's norms are {how} by one than the engine's")
    if kind not in _KNOWN:
        return found
    if trainer.interleaved_rotary:
        found.append("rotary_interleaved: the trainer has the rows of q and k in another order than the engine")
    for what, has, wanted in (
        ("biases of q, k and v", trainer.qkv_bias, kind in _BIASED or bool(config.get("attention_bias"))),
        ("norms of q and k", trainer.qk_norm, kind in _NORMED),
    ):
        if has != wanted:
            one, other = ("trainer", "Hugging Face model") if has else ("Hugging Face model", "trainer")
            found.append(f"{what}: the {one} has them, the {other} has not")
    return found


def surplus(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return a fault for each kind of tensor that the trainer has and the Hugging Face model has not.

    Nobody would ask for it: engines would compute without it, unnoticed. Biases of q, k and v are a matter of
    `differences`; of families that are not known nothing is known.
    """
    kind = str(config.get("model_type") or "")
    if kind not in _KNOWN:
        return []
    known = {"q_proj", "k_proj", "v_proj"}
    if config.get("attention_bias") and kind in _BIASED_OUTPUT:
        known.add("o_proj")
    if config.get("mlp_bias") and kind == "llama":
        known |= {"gate_proj", "up_proj", "down_proj"}
    biases = (name.split(".")[-2] for name in names if name.endswith(".bias"))
    return [f"bias of {module}: the trainer has it, the {kind} model has not" for module in sorted({*biases} - known)]
