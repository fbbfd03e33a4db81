"""What the two forms of the mixed fleet's demo do: the same, for more or fewer versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from demo.grpo import Recipe
from demo.rhymes import LINES, sizes

OTHERS = ("why is the sky blue?", "tell me about dogs", "one two three", "what is a tree?")
VLLM, STAYS, DIES, JOINS = "vllm-1", "sglang-1", "sglang-2", "sglang-3"
"""The fleet: the second SGLang engine is killed, the third joins late."""

MODES = {VLLM: "keep", STAYS: "keep", DIES: "wait", JOINS: "wait"}
"""What each engine's swaps do with running requests."""


@dataclass(frozen=True)
class Profile:
    """One form of the demo, which publishes `versions` versions, `steps` optimizer steps apart.

    What it learns is the way on from the first tokens of each line; it is asked for that, and for answers to `others`,
    which differ from version to version as long as it learns.
    Right after version `killed_at` was published, DIES is killed; when everybody serves version `joined_at`, JOINS is
    started. Every engine makes at least `completions` of each version before the next one.
    """

    name: str
    title: str
    versions: int
    killed_at: int
    joined_at: int
    steps: int
    completions: int = 8
    lines: tuple[str, ...] = LINES
    prompt_tokens: int = 8
    others: tuple[str, ...] = OTHERS
    max_tokens: int = 40
    recipe: Recipe = field(default_factory=lambda: Recipe(learning_rate=3e-3, temperature=1.0))
    seed: int = 1
    sizes: dict[str, Any] = field(default_factory=sizes)


_TITLE = "a tiny model learns rhymes by heart, a vLLM and two SGLang engines follow"
FULL = Profile("sglang", _TITLE, versions=10, killed_at=4, joined_at=6, steps=5)
QUICK = Profile("sglang-quick", _TITLE, versions=5, killed_at=3, joined_at=3, steps=8)
