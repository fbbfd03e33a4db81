"""What the two forms of the Megatron demo do: the same, for more or fewer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LINES = (
    "mary had a little lamb, its fleece was white as snow",
    "twinkle twinkle little star, how i wonder what you are",
    "the quick brown fox jumps over the lazy dog",
    "row, row, row your boat gently down the stream",
)


def _sizes() -> dict[str, Any]:
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
class Profile:
    """One form of the demo: `steps` optimizer steps, each of which makes a version.

    At the versions `proved` the trainer halts until its weights are exported twice and the engine has been asked. The
    loss of the last version has to be at most `reached` times that of the first.
    """

    name: str
    title: str
    steps: int
    proved: tuple[int, ...]
    reached: float
    show_every: int
    lines: tuple[str, ...] = LINES
    prompt_tokens: int = 8
    max_tokens: int = 56
    learning_rate: float = 3e-3
    seed: int = 1
    sizes: dict[str, Any] = field(default_factory=_sizes)


_TITLE = "Megatron on 2 x 2 ranks learns rhymes by heart, vLLM on 2 follows"
FULL = Profile("megatron", _TITLE, steps=50, proved=(12, 50), reached=0.05, show_every=5)
QUICK = Profile("megatron-quick", _TITLE, steps=24, proved=(24,), reached=0.4, show_every=6)
