"""What the demos of Megatron and of the mixed fleet learn: rhymes; and a tiny model without weights to learn them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINES = (
    "mary had a little lamb, its fleece was white as snow",
    "twinkle twinkle little star, how i wonder what you are",
    "the quick brown fox jumps over the lazy dog",
    "row, row, row your boat gently down the stream",
)
DTYPE = "float32"
"""In which one rank's and two ranks' arithmetic differ by less than any answer shows."""


def sizes() -> dict[str, Any]:
    """Return the sizes of a tiny Qwen3, which divide by two wherever tensor parallelism divides them."""
    return {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True)
class Bare:
    """A model without weights: its folder, its Hugging Face configuration, and what is learnt.

    `documents` are token ids, `prompts` their first ones, `starts` the text of those; `tokenizer` made them.
    """

    folder: Path
    config: Mapping[str, Any]
    documents: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    starts: Sequence[str]
    tokenizer: Any


def write_bare(folder: Path, of: Mapping[str, Any], lines: Sequence[str], prompt_tokens: int) -> Bare:
    """Write the config and the tokenizer of a model of these sizes, and no weights."""
    from transformers import Qwen3Config

    from tools.tinymodel import VOCABULARY, build_tokenizer

    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = Qwen3Config(**of, **tokens, architectures=["Qwen3ForCausalLM"], dtype=DTYPE)
    config.save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    documents = [[*tokenizer(line)["input_ids"], tokens["eos_token_id"]] for line in lines]
    prompts = [document[:prompt_tokens] for document in documents]
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Bare(folder, written, documents, prompts, [tokenizer.decode(prompt) for prompt in prompts], tokenizer)
