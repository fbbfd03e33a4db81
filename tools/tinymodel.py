"""Make tiny language models with random weights, for tests and the quick demo.

    .envs/vllm/bin/python -m tools.tinymodel OUT --arch qwen3-tied --seed 1

A folder holds what a real checkpoint holds: config, safetensors, a tokenizer with a chat template. The same arguments
make the same bytes. Sizes divide by 2, so that every model runs with tensor parallelism 1 and 2. Runs in the vLLM
environment, which has transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 330
"""As many as the tokenizer has, and no multiple of 64: engines pad it."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "hello world, this is a tiny corpus for a tiny tokenizer",
    "name three colors: red, blue and green",
    "the quick brown fox jumps over the lazy dog",
]


def _qwen3(tied: bool) -> Callable[[dict[str, Any]], Any]:
    def build(sizes: dict[str, Any]) -> Any:
        head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
        return Qwen3ForCausalLM(Qwen3Config(head_dim=head_dim, tie_word_embeddings=tied, **sizes))

    return build


def _llama(sizes: dict[str, Any]) -> Any:
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **sizes))


def _qwen3_moe(sizes: dict[str, Any]) -> Any:
    config = Qwen3MoeConfig(
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        moe_intermediate_size=sizes["hidden_size"] // 2,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **sizes,
    )
    return Qwen3MoeForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "qwen3": _qwen3(tied=False),
    "qwen3-tied": _qwen3(tied=True),
    "llama": _llama,
    "qwen3-moe": _qwen3_moe,
}


def build_model(arch: str, seed: int, *, hidden: int = 128, layers: int = 2, dtype: str = "bfloat16") -> Any:
    """Return a model of `arch` (see ARCHITECTURES) with random weights drawn from `seed`."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,  # large enough that two seeds disagree about the next token
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ARCHITECTURES[arch](sizes).to(getattr(torch, dtype))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_SPECIAL[0], pad_token=_SPECIAL[0])
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def make_model(
    folder: Path, arch: str, seed: int, *, hidden: int = 128, layers: int = 2, dtype: str = "bfloat16"
) -> Path:
    """Write a checkpoint with tokenizer into `folder` and return it."""
    build_model(arch, seed, hidden=hidden, layers=layers, dtype=dtype).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def main() -> None:
    """Read the command line and make one model."""
    parser = argparse.ArgumentParser(description="Make a tiny language model with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="qwen3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = vars(parser.parse_args())
    print(make_model(**options))


if __name__ == "__main__":
    main()
