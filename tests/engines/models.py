"""Tiny checkpoints of every kind that engines load in their own way, and trainers that publish them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tensorhub_core import Worker, connect
from tools.tinymodel import ARCHITECTURES, VOCABULARY, build_tokenizer, make_model

KINDS = {
    "dense-tied": "qwen3-tied",
    "dense-untied": "llama",
    "moe": "qwen3-moe",
    "mla": "deepseek-v2",
    "mla-yarn": "deepseek-v2-yarn",
    "transposed": "gpt2",
    "bias-one-kv-head": "qwen2",
    "float32": "llama",
    "tied-float32": "qwen3-tied",
    "moe-float32": "qwen3-moe",
    "wider": "llama",
    "deeper": "llama",
}
_SIZES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "tied-float32": {"dtype": "float32"},
    "moe-float32": {"dtype": "float32"},
    "wider": {"hidden": 256},
    "deeper": {"layers": 3},
}

_MLA: dict[str, Any] = {
    "num_attention_heads": 2,
    "initializer_range": 0.05,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1024,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""As DeepSeek's own models have it; SGLang builds them on a CPU with nothing else."""


class Checkpoints:
    """Make checkpoints when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, kind: str, seed: int) -> Path:
        """Return the folder of a checkpoint with config, tokenizer and weights."""
        folder = self._root / f"{kind}-{seed}"
        if not folder.exists():
            arch = KINDS[kind]
            if arch in ARCHITECTURES:
                make_model(folder, arch, seed, **_SIZES.get(kind, {}))
            else:
                _make_other(folder, arch, seed)
        return folder

    def bare(self, kind: str) -> Path:
        """Return a folder without any weight file."""
        folder = self._root / f"{kind}-bare"
        if not folder.exists():
            ignore = shutil.ignore_patterns("*.safetensors*")
            shutil.copytree(self(kind, 1), folder, ignore=ignore)
        return folder


def _make_other(folder: Path, arch: str, seed: int) -> None:
    import transformers

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": VOCABULARY}
    mla = {**sizes, **tokens, **_MLA}
    configs: dict[str, tuple[Any, Any]] = {
        "deepseek-v2": (transformers.DeepseekV2ForCausalLM, transformers.DeepseekV2Config(**mla)),
        "deepseek-v2-yarn": (
            transformers.DeepseekV2ForCausalLM,
            transformers.DeepseekV2Config(**mla, rope_parameters=_YARN, moe_layer_freq=1, scoring_func="softmax"),
        ),
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, n_positions=512, initializer_range=0.2, **tokens),
        ),
        "qwen2": (
            transformers.Qwen2ForCausalLM,
            transformers.Qwen2Config(
                **sizes,
                **tokens,
                intermediate_size=256,
                num_key_value_heads=1,
                max_position_embeddings=512,
                tie_word_embeddings=False,
            ),
        ),
    }
    kind, config = configs[arch]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        with torch.no_grad():  # biases and norms are drawn too: constants would hide a tensor that is not filled
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


class Trainer:
    """Publish checkpoints from live memory, as a trainer does."""

    def __init__(self, worker: Worker, checkpoint: Path, first: int) -> None:
        self.worker = worker
        self.tensors = load_file(checkpoint / "model.safetensors")
        worker.register(self.tensors)
        worker.publish(first)

    def publish(self, checkpoint: Path, version: int) -> None:
        """Overwrite the live tensors in place and publish them as a new version."""
        self.worker.unpublish(30.0)
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            self.tensors[name].copy_(tensor)
        self.worker.publish(version)


@contextmanager
def training(address: str, checkpoint: Path, version: int = 1, **arguments: Any) -> Iterator[Trainer]:
    """Run a trainer that holds `version` of the model `policy`."""
    with connect(address, model="policy", replica="trainer", **arguments) as worker:
        yield Trainer(worker, checkpoint, version)
