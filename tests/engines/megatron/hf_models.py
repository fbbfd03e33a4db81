"""A tiny language model, its tokenizer and its data, for Hugging Face's trainers."""

from __future__ import annotations

from typing import Any

import torch

WORDS = 60


def tiny_model() -> Any:
    """Return a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=WORDS + 3,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
    )


def tokenizer() -> Any:
    """Return a tokenizer of the words w0 to w59."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random token sequences to be learnt by heart."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, WORDS, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}
