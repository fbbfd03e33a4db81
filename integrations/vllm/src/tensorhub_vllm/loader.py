"""Load format `tensorhub`: a model's first weights come from peers, not from a file."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tensorhub_core.engine.config import WeightSourceConfig, weight_source_config
from tensorhub_core.engine.logical import LogicalTensor
from tensorhub_core.engine.session import HubSession
from tensorhub_vllm import compat
from tensorhub_vllm.memory import LoadedWeights

logger = init_logger("vllm.tensorhub")
CONFIG_KEY = "weight_source"
ATTRIBUTE = "_tensorhub_shard"
BOOTSTRAP_VERSION = 0
_HANDOVER_S = 5.0
"""An engine that is told to end has less time to hand over than a trainer: then its workers are killed."""


class TensorHubLoader(DefaultModelLoader):
    """Fill new engines from live weights; draft models still come from disk."""

    def __init__(self, load_config: Any) -> None:
        """Take our keys out of `model_loader_extra_config`; raises ConfigError."""
        extra = dict(load_config.model_loader_extra_config or {})
        self._config = weight_source_config(extra.pop(CONFIG_KEY, None))
        plain = copy.copy(load_config)
        plain.model_loader_extra_config, plain.load_format = extra, "auto"
        super().__init__(plain)
        self._seen: list[LogicalTensor] = []

    def download_model(self, model_config: Any) -> None:
        """Fetch weight files only where a start from disk is possible."""
        if self._config.bootstrap:
            super().download_model(model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Create the model, fill it from peers (or bootstrap), process it and offer it.

        Raises LayoutMismatch before a byte moves if no version fits, DeadlineExceeded if none came in time.
        """
        if model_config is not vllm_config.model_config:
            draft: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
            return draft
        compat.check_supported(vllm_config)
        with compat.new_model(self, vllm_config, model_config, prefix) as (model, device):
            memory = LoadedWeights(model, vllm_config, model_config, device)
            session = session_of(self._config)
            shard = session.start(memory, lambda: self._load(model, model_config))
        object.__setattr__(model, ATTRIBUTE, shard)  # nn.Module would take its tensors for submodules
        ready: torch.nn.Module = model.eval()
        return ready

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors and remember what they are."""
        for name, tensor in super().get_all_weights(model_config, model):
            self._seen.append(LogicalTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            yield name, tensor

    def _load(self, model: torch.nn.Module, model_config: Any) -> list[LogicalTensor]:
        self.load_weights(model, model_config)
        return self._seen


def session_of(config: WeightSourceConfig) -> HubSession:
    """Return this rank's session; every rank of the engine has to call it."""
    return HubSession(config, compat.EngineRanks(), engine="vllm", log=logger)
