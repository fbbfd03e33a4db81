"""A worker extension whose import makes vLLM's loading of Qwen3 compute what it stores, on all ranks but the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from tensorhub_vllm.worker_ext import TensorHubWorkerExtension

_original = Qwen3ForCausalLM.load_weights


class ComputingExtension(TensorHubWorkerExtension):
    """Named in `worker_extension_cls`."""

    def computing_fails(self, rank: int, name: str) -> None:
        """Let one rank's loading fail at a tensor from now on; an empty name lets it succeed."""
        if self.rank == rank:  # type: ignore[attr-defined]
            Qwen3ForCausalLM.fails_at = name


def computing(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """Load copies that are computed, the first rank the tensors themselves."""

    def computed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            if name == Qwen3ForCausalLM.fails_at:
                raise RuntimeError(f"{name} cannot be loaded")
            yield name, weight * 1 if get_tensor_model_parallel_rank() else weight

    return _original(self, computed())


Qwen3ForCausalLM.fails_at = ""
Qwen3ForCausalLM.load_weights = computing
