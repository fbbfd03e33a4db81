"""An engine with `--enable-lora`: the weights under the adapters are swapped, and the adapters stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensorhub_core import Server

from ..models import Checkpoints, training
from .engines import PROMPTS, answers, following, running

pytestmark = pytest.mark.timeout(300)
KIND = "dense-untied"
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
ADAPTED = {"self_attn.q_proj": (128, 128), "mlp.down_proj": (256, 128)}


@pytest.fixture
def adapter(folder: Path) -> Path:
    """An adapter with random weights for some layers of the model."""
    drawn, tensors = torch.Generator().manual_seed(1), {}
    for layer in (0, 1):
        for module, (width, height) in ADAPTED.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, width, generator=drawn) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(height, 8, generator=drawn) * 0.3
    modules = [name.rpartition(".")[2] for name in ADAPTED]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": modules, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapted(llm: Any, adapter: Path) -> list[list[int]]:
    """Return the tokens that the adapter makes of the prompts."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=LoRARequest("one", 1, str(adapter)))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_weights_are_swapped_under_adapters(checkpoints: Checkpoints, hub: Server, adapter: Path) -> None:
    with running(checkpoints(KIND, 2), **LORA) as llm:
        expected = answers(llm), adapted(llm, adapter)
    with (
        training(hub.address, checkpoints(KIND, 1)) as trainer,
        following(checkpoints.bare(KIND), hub.address, engine=LORA) as (llm, engine),
    ):
        before = answers(llm), adapted(llm, adapter)
        trainer.publish(checkpoints(KIND, 2), 2)
        outcome = engine.swap()
        assert (outcome.version, outcome.message) == (2, "")
        assert (answers(llm), adapted(llm, adapter)) == expected
        assert all(old != new for old, new in zip(before, expected, strict=True))
        assert expected[1] != [tokens for tokens, _ in expected[0]], "the adapter changes the answers"
