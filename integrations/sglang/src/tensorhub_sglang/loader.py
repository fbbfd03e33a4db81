"""Load format `tensorhub`: a model's first weights come from peers, not from a file."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader

from tensorhub_core.engine.logical import LogicalTensor
from tensorhub_core.engine.session import HubSession
from tensorhub_core.errors import ConfigError
from tensorhub_sglang import ATTRIBUTE, CONFIG_KEY, compat
from tensorhub_sglang.arguments import config_in, config_of
from tensorhub_sglang.memory import LoadedWeights

logger = logging.getLogger("sglang.tensorhub")


class TensorHubLoader(DefaultModelLoader):
    """Fill a rank of a new engine from live weights."""

    def __init__(self, load_config: Any) -> None:
        """Take our keys out of `model_loader_extra_config`; raises ConfigError."""
        extra = dict(load_config.model_loader_extra_config or {})
        self._config = config_in(extra)
        extra.pop(CONFIG_KEY)
        plain = copy.copy(load_config)
        plain.model_loader_extra_config, plain.load_format = extra, "auto"
        super().__init__(plain)
        self._seen: list[LogicalTensor] = []

    def download_model(self, model_config: Any) -> None:
        """Fetch weight files only where a start from disk is possible."""
        if self._config.bootstrap:
            super().download_model(model_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Create the model, fill it from peers (or bootstrap), process it and offer it.

        Raises LayoutMismatch before a byte moves if no version fits, DeadlineExceeded if none came in time.
        """
        if getattr(model_config, "is_draft_model", False):
            raise ConfigError("a draft model cannot be filled from a hub")
        prepare_rank()
        options, ranks = compat.own_options(), compat.SGLangRanks()
        compat.check_supported(options, model_config)
        device = torch.device(device_config.device)
        with compat.loading(model_config.dtype):
            model = compat.new_model(model_config, self.load_config, device)
        compat.check_model(model, ranks.count)
        memory = LoadedWeights(model, compat.config_key(model_config, options), model_config.dtype, device)
        memory.process()  # refuses what cannot be swapped, while nobody reads it yet
        session = HubSession(self._config, ranks, engine="sglang", log=logger)
        shard = session.start(memory, lambda: self._load_from_disk(model, model_config, device))
        object.__setattr__(model, ATTRIBUTE, shard)  # nn.Module would take its tensors for submodules
        return model.eval()

    def _load_from_disk(self, model: torch.nn.Module, model_config: Any, device: torch.device) -> list[LogicalTensor]:
        with compat.loading(model_config.dtype):
            compat.load_from_disk(self, model, self._remembered(self._get_all_weights(model_config, model)), device)
        return self._seen

    def _remembered(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a checkpoint's tensors and remember what they are."""
        for name, tensor in weights:
            self._seen.append(LogicalTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            yield name, tensor


def prepare_rank() -> None:
    """Let the server reach this rank; to be called before its scheduler makes its table of requests.

    Raises StateError if SGLang did not take the hooks: then the engine could be filled, but not swapped.
    """
    from tensorhub_sglang import compat_server, rank

    if not compat.is_hooked(compat.DISPATCHER):
        compat_server.hook_schedulers(rank.handle, lambda server_args: config_of(server_args) is not None, ATTRIBUTE)
    compat.apply_hooks()
