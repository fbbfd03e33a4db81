"""In-process vLLM engines, and what they answer."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorhub_vllm import engine_args
from tensorhub_vllm.offline import OfflineEngine

LONG = [(i * 7) % 300 + 3 for i in range(150)]
"""Longer than several cache blocks: answered from the prefix cache when it is asked twice."""
PROMPTS = [[5, 6, 7, 8, 9], [100, 200, 300], LONG]
Answers = list[tuple[list[int], list[float]]]


@contextmanager
def running(model: Path, **arguments: Any) -> Iterator[Any]:
    """Run an `LLM` in this process and end it for good; that ends vLLM's process groups, so engines end together."""
    from vllm import LLM

    llm = LLM(
        str(model),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=32 << 20,
        seed=0,
        disable_log_stats=True,
        **arguments,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextmanager
def following(
    model: Path, address: str, *, engine: dict[str, Any] | None = None, **config: Any
) -> Iterator[tuple[Any, OfflineEngine]]:
    """Run an `LLM` that gets its weights from a hub; `engine` = further arguments of the `LLM`."""
    settings = {"server": address, "timeout_s": 60, **config}
    with running(model, **{**engine_args(settings), **(engine or {})}) as llm:
        yield llm, OfflineEngine(llm, settings)


def answers(llm: Any) -> Answers:
    """Return tokens and log probabilities at temperature 0, one request at a time."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    result: Answers = []
    for prompt in PROMPTS:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        completion = output.outputs[0]
        logprobs = [next(iter(step.values())).logprob for step in completion.logprobs]
        result.append((list(completion.token_ids), logprobs))
    return result


def fresh(checkpoint: Path, **arguments: Any) -> Answers:
    """Return what an engine answers that loaded the checkpoint from disk; asked once for each way to bind threads."""
    return _fresh(checkpoint, os.environ["VLLM_CPU_OMP_THREADS_BIND"], **arguments)


@functools.cache
def _fresh(checkpoint: Path, binding: str, **arguments: Any) -> Answers:
    with running(checkpoint, **arguments) as llm:
        return answers(llm)


def shard_of(llm: Any) -> Any:
    """Return the engine's rank 0, which lives in this process."""
    from tensorhub_vllm.loader import ATTRIBUTE

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker.get_model(), ATTRIBUTE)
