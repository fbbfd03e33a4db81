"""An SGLang engine that takes its weights from a vLLM engine: other names, other shapes, the same logical tensors."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub_core import Server

from ..models import Checkpoints, training
from .server import FLOAT32, Servers
from .zygote import ROOT

pytestmark = pytest.mark.timeout(400)
KIND = "tied-float32"
VLLM = ROOT / ".envs" / "vllm" / "bin" / "python"
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
}


@contextlib.contextmanager
def vllm_peer(model: Path, address: str, folder: Path) -> Iterator[None]:
    """Run a vLLM engine that holds the newest version as replica `vllm`."""
    command = [str(VLLM), "-m", "tests.engines.vllm.peer", str(model), address, "vllm"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        (folder / "vllm.log").open("wb") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if line.startswith(b"serving")), b"")
            assert said == b"serving 1\n", (folder / "vllm.log").read_text(errors="replace")[-6000:]
            yield
        finally:
            process.kill()


def test_ranks_of_an_engine_fill_from_a_vllm_engine(
    servers: Servers, checkpoints: Checkpoints, hub: Server, folder: Path
) -> None:
    fresh = servers.fresh(checkpoints(KIND, 1), *FLOAT32, ranks=2)
    bare = checkpoints.bare(KIND)
    with (
        training(hub.address, checkpoints(KIND, 1)) as trainer,
        vllm_peer(bare, hub.address, folder),
    ):
        trainer.worker.unpublish(30.0)
        config = {"server": hub.address, "follow": False, "timeout_s": 60}
        with servers.running(bare, *FLOAT32, config=config, ranks=2) as server:
            assert {shard["source"] for shard in server.version()["shards"]} == {"vllm"}
            assert [server.memory(rank) for rank in (0, 1)] == fresh.memory
            assert server.answers() == fresh.answers
