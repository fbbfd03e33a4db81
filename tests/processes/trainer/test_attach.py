"""A reader in another process sees, for every version, the weights that the same training makes without TensorHub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from tensorhub_core import RegistrationError, connect, serve
from tensorhub_megatron import attach_optimizer

STEPS = 4
READER = """
import hashlib, sys
import torch
from tensorhub_core import connect

torch.manual_seed(1)
names = {"embedding.weight": (64, 32), "head.weight": (64, 32), "norm.bias": (32,)}
tensors = {name: torch.rand(shape) for name, shape in names.items()}
tensors["head.weight"] = tensors["embedding.weight"]
with connect(sys.argv[1], model="m", replica="reader") as worker:
    worker.register(tensors)
    version = None
    while version is None or version < int(sys.argv[2]):
        worker.wait(newer_than=version, timeout_s=30)
        version = worker.update(timeout_s=30)
        digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
        print(int(version), digest.hexdigest(), flush=True)
"""


class TiedModel(torch.nn.Module):
    """An embedding whose weight is also the output layer's, with a bias in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 32)
        self.norm = torch.nn.ParameterDict({"bias": torch.nn.Parameter(torch.zeros(32))})
        self.head = torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens) + self.norm["bias"])


def backward(model: torch.nn.Module) -> None:
    tokens = torch.arange(63)
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(tokens), tokens + 1).backward()


def digest(model: torch.nn.Module) -> str:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return hashlib.sha256(
        b"".join(parameters[name].detach().numpy().tobytes() for name in sorted(parameters))
    ).hexdigest()


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    with serve(retain=getattr(request, "param", None)) as server:
        yield server.address


@pytest.mark.timeout(120)
def test_every_version_that_is_read_is_the_one_that_training_made(address: str) -> None:
    alone = TiedModel()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    expected = {10: digest(alone)}
    for version in range(11, 11 + STEPS):
        backward(alone)
        optimizer.step()
        expected[version] = digest(alone)

    model = TiedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    command = [sys.executable, "-c", READER, address, str(10 + STEPS)]
    seen = {}
    with (
        attach_optimizer(model, optimizer, server=address, model="m", stream="run", start_version=10) as publisher,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader,
    ):
        assert reader.stdout is not None
        for _ in range(STEPS + 1):
            version, found = reader.stdout.readline().split()
            seen[int(version)] = found
            if publisher.version < 10 + STEPS:
                backward(model)
                optimizer.step()
        assert reader.wait(timeout=60) == 0
    assert seen == expected


@pytest.mark.timeout(60)
def test_a_failed_attach_leaves_nothing_attached_and_no_worker(address: str) -> None:
    model = TiedModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RegistrationError):
        attach_optimizer(model, optimizer, server=address, model="m", tensors={"": torch.zeros(3)})
    assert not optimizer._optimizer_step_pre_hooks
    with connect(address, model="m", replica="watcher") as watcher:
        assert watcher.versions() == []


def move(linear: torch.nn.Linear) -> None:
    linear.weight.data = linear.weight.data.clone()


def replace(linear: torch.nn.Linear) -> None:
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())


def cast(linear: torch.nn.Linear) -> None:
    linear.to(torch.bfloat16)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("address", [0], indirect=True, ids=["retaining nothing"])
@pytest.mark.parametrize("change", [move, replace, cast])
def test_weights_that_moved_are_published_from_where_they_are(
    address: str, change: Callable[[torch.nn.Linear], None]
) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    with attach_optimizer(model, optimizer, server=address, model="m") as publisher:
        change(model)
        with torch.no_grad():
            model.weight.fill_(3.0)
        optimizer.step()
        assert publisher.version == 1
        tensors = {name: torch.full_like(parameter, 9.0) for name, parameter in model.named_parameters()}
        with connect(address, model="m", replica="reader") as reader:
            reader.register(tensors)
            assert reader.replicate(timeout_s=30) == 1
        assert tensors["weight"].eq(3.0).all()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("address", [0], indirect=True, ids=["retaining nothing"])
def test_weights_whose_memory_is_gone_are_never_published(address: str) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    with attach_optimizer(model, optimizer, server=address, model="m") as publisher:
        model.weight.untyped_storage().resize_(0)
        with pytest.raises(RegistrationError, match="weight"):
            optimizer.step()
        assert publisher.version == 0
        with connect(address, model="m", replica="watcher") as watcher:
            assert watcher.versions() == []
