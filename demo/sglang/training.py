"""The mixed fleet's trainer: a small model in float32 that learns documents by heart."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from demo.grpo import Policy, Sample
from demo.rhymes import Bare
from demo.sglang.profiles import Profile


def build(bare: Bare, profile: Profile) -> Policy:
    """Return the model in training, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(profile.seed)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bare.folder), dtype=torch.float32)
    return Policy(model.eval(), profile.recipe)


def documents(bare: Bare, profile: Profile) -> list[Sample]:
    """Return what it learns: each document's way on from its first tokens, all worth the same."""
    return [
        Sample(tuple(document[: profile.prompt_tokens]), tuple(document[profile.prompt_tokens :]), 1.0)
        for document in bare.documents
    ]


def train(policy: Policy, samples: Sequence[Sample], steps: int) -> None:
    """Take some steps; rewrites the live parameters in place, so they must not be published."""
    for _ in range(steps):
        policy.accumulate(samples)
        policy.apply()


def save(policy: Policy, bare: Bare, folder: Path) -> None:
    """Write the live parameters as a checkpoint that any engine loads; only reads them."""
    shutil.copytree(bare.folder, folder)
    policy.model.save_pretrained(folder)
    shutil.copy(bare.folder / "config.json", folder / "config.json")
