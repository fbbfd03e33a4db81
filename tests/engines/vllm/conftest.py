"""Real vLLM on the CPU, tiny models. Engines run in this process unless a test is about servers or several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TORCH_COMPILE_DISABLE="1",
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)
# In this process, binding threads would also bind the test's own threads to one core.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from tensorhub_core import Server, serve

from ..models import Checkpoints


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
