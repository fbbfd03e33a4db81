"""Read a Hugging Face configuration, and compare it with the trainer's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorhub_core.errors import ConfigError
from tensorhub_megatron.names import ModelDims


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
    file = path / "config.json" if path.is_dir() else path
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
