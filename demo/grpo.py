"""Train a language model by policy gradient on groups of completions (GRPO, one gradient step per version).

The parameters that forward and backward use are the ones that are published: they stay where they are, in bfloat16, and
are rewritten in place from float32 masters by `Policy.apply()`. Nothing here knows how weights travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One completion: token ids of the prompt and of the answer, and how much better it was than its group."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    advantage: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return how many standard deviations each reward of a group lies above the group's mean; all equal give zeros."""
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / deviation if deviation > 1e-6 else 0.0 for reward in rewards]


@dataclass(frozen=True)
class Recipe:
    """How to train. `temperature` is the one the completions were drawn with."""

    learning_rate: float
    temperature: float
    samples_at_once: int = 8
    gradient_norm: float = 1.0


class Policy:
    """A Hugging Face causal language model in training.

    `accumulate` only reads the parameters, so that they may be published meanwhile; `apply` rewrites them in place.
    """

    def __init__(self, model: Any, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self._live: list[torch.Tensor] = list(model.parameters())
        self._masters = [parameter.detach().to(torch.float32, copy=True) for parameter in self._live]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        self._accumulated = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live parameters by name; tied ones once. The memory stays the same for the policy's whole life."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def accumulate(self, samples: Sequence[Sample]) -> int:
        """Compute the gradient of one step; returns how many samples had something to teach."""
        useful = sorted((s for s in samples if s.advantage and s.answer), key=lambda s: len(s.prompt) + len(s.answer))
        total = sum(len(sample.answer) for sample in useful)
        self.model.zero_grad(set_to_none=True)
        for start in range(0, len(useful), self.recipe.samples_at_once):
            batch = useful[start : start + self.recipe.samples_at_once]
            weights = torch.tensor([s.advantage / total for s in batch for _ in s.answer])
            (-(self._log_probabilities(batch) * weights).sum()).backward()  # type: ignore[no-untyped-call]
        self._accumulated = bool(useful)
        return len(useful)

    @torch.no_grad()
    def loss(self, samples: Sequence[Sample]) -> float:
        """Return the mean loss of the answers' tokens; only reads the parameters."""
        losses = -self._log_probabilities(samples)
        return float(losses.mean())

    def _log_probabilities(self, batch: Sequence[Sample]) -> torch.Tensor:
        """Return the log-probabilities of all answers' tokens, one sample after the other [tokens]."""
        longest = max(len(s.prompt) + len(s.answer) for s in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(batch):
            length = len(sample.prompt) + len(sample.answer)
            ids[row, :length] = torch.tensor(sample.prompt + sample.answer)
            mask[row, :length] = 1
        hidden = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        rows, columns = zip(*_predicting_positions(batch), strict=True)
        targets = torch.tensor([token for s in batch for token in s.answer])
        # Only the positions that predict an answer's token go through the vocabulary: it is the widest layer.
        logits = self.model.get_output_embeddings()(hidden[list(rows), list(columns)]).float()
        chosen = torch.log_softmax(logits / self.recipe.temperature, dim=-1).gather(-1, targets[:, None])
        return chosen.squeeze(-1)

    @torch.no_grad()
    def apply(self) -> float:
        """Take the step and rewrite the live parameters; returns the gradient's norm. They must not be published."""
        if not self._accumulated:
            return 0.0
        for live, master in zip(self._live, self._masters, strict=True):
            master.grad = None if live.grad is None else live.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self.recipe.gradient_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError("the gradient is not finite")
        self._optimizer.step()
        for live, master in zip(self._live, self._masters, strict=True):
            live.copy_(master)
        self.model.zero_grad(set_to_none=True)
        self._accumulated = False
        return float(norm)


def _predicting_positions(batch: Sequence[Sample]) -> Iterator[tuple[int, int]]:
    """Yield (row, column) of the position that predicts each token of each answer."""
    for row, sample in enumerate(batch):
        for place in range(len(sample.answer)):
            yield row, len(sample.prompt) + place - 1
