"""What the two forms of the mixed fleet's demo do: the same, for more or fewer versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from demo.grpo import Recipe
from demo.rhymes import LINES, sizes

VLLM, STAYS, DIES, JOINS = "vllm-1", "sglang-1", "sglang-2", "sglang-3"
"""The fleet: the second SGLang engine is killed, the third joins late."""

MODES = {VLLM: "keep", STAYS: "keep", DIES: "wait", JOINS: "wait"}
"""What each engine's swaps do with running requests."""


@dataclass(frozen=True)
class Profile:
    """One form of the demo, which publishes `versions` versions.

    Right after version `killed_at` was published, DIES is killed; when everybody serves version `joined_at`, JOINS is
    started. Every engine makes at least `completions` of each version before the next one.
    """

    name: str
    title: str
    versions: int
    killed_at: int
    joined_at: int
    completions: int = 4
    lines: tuple[str, ...] = LINES
    prompt_tokens: int = 8
    max_tokens: int = 40
    recipe: Recipe = field(default_factory=lambda: Recipe(learning_rate=5e-3, temperature=1.0))
    seed: int = 1
    sizes: dict[str, Any] = field(default_factory=sizes)


_TITLE = "a tiny model learns rhymes by heart, a vLLM and two SGLang engines follow"
FULL = Profile("sglang", _TITLE, versions=10, killed_at=4, joined_at=6)
QUICK = Profile("sglang-quick", _TITLE, versions=6, killed_at=3, joined_at=4)
