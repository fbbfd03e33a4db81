"""SGLang adapter: start engines from live weights and swap versions while they serve."""

from __future__ import annotations

import json
from typing import Any

from tensorhub_core.engine.config import WeightSourceConfig, weight_source_config

BACKEND = "tensorhub"
CONFIG_KEY = "weight_source"
"""Where SGLang's `model_loader_extra_config`, which reaches every process of an engine, has our config."""
ATTRIBUTE = "_tensorhub_shard"
"""Under which a rank's model keeps its EngineShard."""


def engine_args(config: str | dict[str, Any] | WeightSourceConfig | None = None) -> dict[str, Any]:
    """Return the arguments of `sglang.Engine` that make it start from a hub, as `--weight-source tensorhub` does.

    `config` has the keys of `--weight-source-config`. Raises ConfigError.
    """
    if not isinstance(config, WeightSourceConfig):
        config = weight_source_config(config)
    return {"load_format": BACKEND, "model_loader_extra_config": json.dumps({CONFIG_KEY: config.as_dict()})}
