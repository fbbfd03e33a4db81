"""vLLM adapter: start engines from live weights and swap versions between requests."""

from __future__ import annotations

from typing import Any

from tensorhub_core.engine.config import WeightSourceConfig, weight_source_config

BACKEND = "tensorhub"
WORKER_EXTENSION = "tensorhub_vllm.worker_ext.TensorHubWorkerExtension"


def engine_args(config: str | dict[str, Any] | WeightSourceConfig | None = None) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that make it start from a hub, as `--weight-source tensorhub` does.

    `config` has the keys of `--weight-source-config`. Raises ConfigError.
    """
    if not isinstance(config, WeightSourceConfig):
        config = weight_source_config(config)
    return {
        "load_format": BACKEND,
        "model_loader_extra_config": {"weight_source": config.as_dict()},
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
    }
