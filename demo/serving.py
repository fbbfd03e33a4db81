"""The command lines of the programs the demo starts: the hub, the engines, the fresh engine of the proof."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.engines import SERVED_NAME
from demo.processes import Child, Children, wait_until

MODEL = "policy"
ENGINE_LIMITS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 128 << 20,
    "seed": 0,
}
"""Alike for the followers and the fresh engine of the proof."""

_HUB_S = 60.0
_LISTENING = re.compile(r"^listening on (\S+)$", re.MULTILINE)


def cores() -> list[int]:
    """Return the processor cores this process may use."""
    return sorted(os.sched_getaffinity(0))


def engine_environment(*cores: int) -> dict[str, str]:
    """Return the environment of an engine: each rank computes on one core with one thread, unbound it crawls."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }


def start_hub(children: Children) -> tuple[Child, str]:
    """Start `tensorhub serve` on a free port; returns it and its address."""
    command = [sys.executable, "-m", "tensorhub_core.cli.main", "serve", "--bind", "tcp://127.0.0.1:0"]
    hub = children.start("hub", command, {"PYTHONUNBUFFERED": "1"})
    found: list[str] = []

    def listens() -> bool:
        found.extend(_LISTENING.findall(hub.text()))
        return bool(found)

    wait_until("the hub listens", listens, [hub], _HUB_S)
    return hub, found[0]


def source_config(hub: str, replica: str, **keys: Any) -> dict[str, Any]:
    """Return an engine's `--weight-source-config`: it follows the hub's newest version."""
    return {"server": hub, "model": MODEL, "replica": replica, "follow": True, "timeout_s": 300, **keys}


def start_engine(
    children: Children,
    replica: str,
    model: Path,
    hub: str,
    port: int,
    *cores: int,
    staged: bool = False,
    mode: str = "wait",
    dtype: str = "bfloat16",
    options: Sequence[str] = (),
) -> Child:
    """Start `vllm serve MODEL --weight-source tensorhub` with a rank on each core; it follows the hub's newest version.

    `staged`: it fetches a version while it serves the one before, and stands still only to put it in place. `mode`:
    what its swaps do with running requests. `options`: further ones of `vllm serve`.
    """
    source = source_config(hub, replica, mode=mode, staged=staged)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--weight-source", "tensorhub", "--weight-source-config", json.dumps(source)]
    command += ["--tensor-parallel-size", str(len(cores)), *options]
    for name, value in {**ENGINE_LIMITS, "dtype": dtype}.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    return children.start(replica, command, engine_environment(*cores))


def start_fresh(
    children: Children, checkpoint: Path, ask: Path, out: Path, core: int, *, dtype: str = "bfloat16"
) -> Child:
    """Start a stock vLLM, no plugin loaded, on a saved checkpoint (fresh.py)."""
    environment = {**engine_environment(core), "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "demo.fresh", str(checkpoint), str(ask), str(out), dtype]
    return children.start("fresh", command, environment)
