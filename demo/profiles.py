"""What the two forms of the demo do: the real and the quick one run the same code on other models and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo import models
from demo.engines import Request
from demo.grpo import Recipe
from demo.reward import BRIEF, PLAIN_LETTERS, Rule


@dataclass(frozen=True)
class Profile:
    """One form of the demo.

    `model(folder)` returns a checkpoint's folder; it may make one in `folder`. Each version draws `group` completions
    for each of `prompts_at_once` prompts, taken in turn. The answers to `shown` are printed; `held_out` are asked only
    in the proof. `margin` is what the mean reward of the last third of the versions must have gained on the first
    third. The second engine is started after `late_after` versions.
    """

    name: str
    title: str
    model: Callable[[Path], Path]
    rule: Rule
    instruction: str
    prompts: tuple[str, ...]
    held_out: tuple[str, ...]
    shown: tuple[str, ...]
    prompts_at_once: int
    group: int
    max_tokens: int
    versions: int
    late_after: int
    recipe: Recipe
    margin: float
    show_every: int
    seed: int = 20

    def questions(self, version: int) -> list[Request]:
        """Return what to ask the engines while they serve `version`, counted from 1; the seeds are all different."""
        first = (version - 1) * self.prompts_at_once
        return [
            Request(
                instruction=self.instruction,
                prompt=self.prompts[number % len(self.prompts)],
                max_tokens=self.max_tokens,
                count=self.group,
                temperature=self.recipe.temperature,
                seed=self.seed + number * self.group,
            )
            for number in range(first, first + self.prompts_at_once)
        ]

    def greedy(self, prompt: str) -> Request:
        """Return the request for the likeliest answer to `prompt`."""
        return Request(instruction=self.instruction, prompt=prompt, max_tokens=self.max_tokens)


FULL = Profile(
    name="full",
    title="SmolLM2-135M-Instruct learns to answer in one short sentence",
    model=models.smollm2,
    rule=BRIEF,
    instruction="Answer in one short sentence.",
    prompts=(
        "Tell me about dogs.",
        "Why is the sky blue?",
        "What is a good hobby?",
        "How can I sleep better?",
        "Tell me about the moon.",
        "Why do cats sleep so much?",
        "What is the best season of the year?",
        "How do I make tea?",
    ),
    held_out=("Tell me about elephants.", "Why is the grass green?", "What is a volcano?", "How do birds fly?"),
    shown=("Why is the sky blue?", "What is a good hobby?", "How can I sleep better?"),
    prompts_at_once=4,
    group=6,
    max_tokens=40,
    versions=16,
    late_after=1,
    recipe=Recipe(learning_rate=1.5e-5, temperature=0.7),
    margin=0.15,
    show_every=4,
)

QUICK = Profile(
    name="quick",
    title="a tiny random model learns to write letters instead of noise",
    model=models.tiny,
    rule=PLAIN_LETTERS,
    instruction="Use letters.",
    prompts=(
        "Name three colors.",
        "Why is the sky blue?",
        "Say hello.",
        "Tell me a story.",
        "What is a tree?",
        "Who are you?",
        "Where is the sun?",
        "Count to ten.",
    ),
    held_out=("Name a river.", "What is rain?", "Sing a song.", "Where do birds live?"),
    shown=("Name three colors.", "Say hello.", "Name a river."),
    prompts_at_once=4,
    group=8,
    max_tokens=24,
    versions=18,
    late_after=1,
    recipe=Recipe(learning_rate=3e-4, temperature=1.0, samples_at_once=16),
    margin=0.15,
    show_every=4,
)
