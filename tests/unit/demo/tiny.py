"""A language model of a few hundred numbers with the three members of a Hugging Face model that training uses."""

from __future__ import annotations

from types import SimpleNamespace

import torch

VOCABULARY = 11


class TinyModel(torch.nn.Module):
    """Predict a token from the mean of all tokens up to it, so that padding in the wrong place would show."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = torch.nn.Embedding(VOCABULARY, 8)
            self.head = torch.nn.Linear(8, VOCABULARY, bias=False)
        self.to(dtype)

    def base_model(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        """Return hidden states [samples, positions, 8]."""
        mask = attention_mask[:, :, None].to(self.head.weight.dtype)
        hidden = (self.embedding(input_ids) * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)
        return SimpleNamespace(last_hidden_state=hidden)

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the layer that makes logits."""
        return self.head

    def log_probabilities(self, prompt: tuple[int, ...], temperature: float) -> torch.Tensor:
        """Return those of the token after a prompt [vocabulary], computed one position at a time."""
        ids = torch.tensor([prompt])
        hidden = self.base_model(ids, torch.ones_like(ids)).last_hidden_state[0, -1]
        return torch.log_softmax(self.head(hidden).float() / temperature, -1)
