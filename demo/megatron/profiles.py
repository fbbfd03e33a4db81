"""What the two forms of the Megatron demo do: the same, for more or fewer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from demo.rhymes import LINES, sizes


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
    sizes: dict[str, Any] = field(default_factory=sizes)


_TITLE = "Megatron on 2 x 2 ranks learns rhymes by heart, vLLM on 2 follows"
FULL = Profile("megatron", _TITLE, steps=50, proved=(12, 50), reached=0.05, show_every=5)
QUICK = Profile("megatron-quick", _TITLE, steps=24, proved=(24,), reached=0.4, show_every=6)
