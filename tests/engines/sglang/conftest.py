"""Real SGLang on the CPU, tiny models. Servers are forked from one process; tests of a module share them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
sys.path.insert(0, str(Path(__file__).parent / "shim"))  # transformers imports torchvision where it is installed

from tensorhub_core import Server, serve

from ..models import Checkpoints
from .server import Servers
from .zygote import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that forks; it, and what it forked, end with the tests."""
    zygote = Zygote(tmp_path_factory.mktemp("sglang"))
    zygote.begin()  # imports while the first test makes its models
    try:
        yield zygote
    finally:
        zygote.close()


@pytest.fixture(scope="session")
def servers(zygote: Zygote) -> Servers:
    """Starts servers and knows what fresh ones answer."""
    return Servers(zygote, zygote.folder)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny checkpoints by kind and seed, each made once."""
    return Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture
def hub() -> Iterator[Server]:
    """A reference server of the test's own."""
    with serve("tcp://127.0.0.1:0", lease_s=2.0, heartbeat_s=0.5) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the test's own."""
    return tmp_path
