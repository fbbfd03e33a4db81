"""Random lives of a trainer: whatever it does between two reads, readers have the bytes of the version they hear of."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tensorhub_core import StateError, TensorHubError, Worker, connect, serve
from tensorhub_megatron import attach_fsdp, attach_optimizer

SETTINGS = {"handover_s": 0}
ACTS = ("step", "step", "step", "skip", "fail", "move", "take_back", "put_back", "change", "read", "read")
HISTORIES = 12


class Trainer:
    """A model, its optimizer and publisher, and what versions have to be."""

    def __init__(self, address: str, name: str, chance: random.Random) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        self.is_tied = chance.random() < 0.3
        if self.is_tied:
            self.model[1].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=chance.random() < 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.every = chance.choice((1, 1, 2, 3))
        self.cast = chance.random() < 0.4
        attach: Any = attach_fsdp if self.cast or chance.random() < 0.5 else attach_optimizer
        how = {"cast": "bf16"} if self.cast else {}
        self.publisher = attach(
            self.model, self.optimizer, server=address, model=name, every=self.every, settings=SETTINGS, **how
        )
        self.number = self.steps = 0
        self.is_offered = self.is_current = True
        self.is_broken = False
        self.truth = {0: self.weights()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what a reader has to have now."""
        state = self.model.state_dict()
        return {
            name: tensor.clone().to(torch.bfloat16 if self.cast else tensor.dtype) for name, tensor in state.items()
        }

    def next_version(self) -> None:
        """Count up, as publishing does."""
        self.number, self.steps = self.number + 1, 0
        self.truth[self.number] = self.weights()
        self.is_offered, self.is_current, self.is_broken = True, True, False

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.is_offered = self.is_current = self.is_broken = False
        self.steps += 1
        if self.steps == self.every:
            self.next_version()

    def skip(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        self.scaler.scale(torch.ones(()))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def fail(self) -> None:
        with pytest.raises(ZeroDivisionError):
            self.optimizer.step(lambda: 1 / 0)  # type: ignore[arg-type]
        self.is_offered, self.is_current, self.is_broken = False, False, True

    def move(self) -> None:
        if not self.is_offered:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()

    def take_back(self) -> None:
        self.publisher.unpublish()
        self.is_offered = False

    def put_back(self) -> None:
        with pytest.raises(StateError) if self.is_broken else contextlib.nullcontext():
            self.publisher.publish()
        self.is_offered = self.is_current

    def change(self) -> None:
        with pytest.raises(StateError) if self.is_offered else contextlib.nullcontext():
            if not self.is_offered:
                with torch.no_grad():
                    self.model[0].weight.add_(1)
            self.publisher.publish(changed=True)
            self.next_version()


def update(reader: Worker, is_offered: bool) -> int | None:
    """Return the version that a reader has got, None if there is none for it."""
    try:
        return int(reader.update(timeout_s=10))
    except TensorHubError:
        if is_offered:
            raise
        return None


@pytest.fixture
def address() -> Iterator[str]:
    with serve() as server:
        yield server.address


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(4))
def test_a_reader_has_the_bytes_of_the_version_that_it_is_told(seed: int, address: str) -> None:
    for history in range(HISTORIES):
        chance, name = random.Random(100 * seed + history), f"model-{history}"
        acts = [chance.choice(ACTS) for _ in range(chance.randint(5, 25))]
        trainer = Trainer(address, name, chance)
        memory = {key: torch.empty_like(tensor) for key, tensor in trainer.truth[0].items()}
        if trainer.is_tied:
            memory["1.weight"] = memory["0.weight"]
        with connect(address, model=name, replica="reader", settings=SETTINGS) as reader:
            reader.register(memory)
            for number, act in enumerate(acts):
                where = (seed, history, acts[: number + 1])
                if act != "read":
                    getattr(trainer, act)()
                    assert trainer.publisher.version == trainer.number, where
                    continue
                taken = update(reader, trainer.is_offered)
                if taken is None:
                    continue
                assert taken == trainer.number or not trainer.is_offered, where
                assert all(torch.equal(memory[key], want) for key, want in trainer.truth[taken].items()), where
        trainer.publisher.close()
