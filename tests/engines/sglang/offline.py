"""What runs in a forked process: an `sglang.Engine`, of which there is one a process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .server import PROMPTS, sampling

PATIENCE_S = 60.0


def start_and_swap(model: str, arguments: dict[str, Any], folder: str) -> None:
    """Start an engine, answer, swap to version 2 when the file `go` is there, answer again; results go to files."""
    import sglang

    from tensorhub_sglang.offline import OfflineEngine

    with sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        mem_fraction_static=0.05,
        max_total_tokens=4096,
        max_running_requests=8,
        random_seed=0,
        **arguments,
    ) as engine:
        offline = OfflineEngine(engine)
        _write(Path(folder) / "1", engine, offline.status.version)
        until = time.monotonic() + PATIENCE_S
        while not (Path(folder) / "go").exists():
            if time.monotonic() > until:
                raise TimeoutError("nobody said go")
            time.sleep(0.05)
        outcome = offline.swap(2)
        _write(Path(folder) / "2", engine, outcome.version if outcome.ok else outcome.message)


def _write(path: Path, engine: Any, version: Any) -> None:
    completions = [engine.generate(input_ids=list(prompt), sampling_params=sampling(12)) for prompt in PROMPTS]
    found = {
        "version": version,
        "answers": [completion["output_ids"] for completion in completions],
        "weight_versions": [completion["meta_info"]["weight_version"] for completion in completions],
    }
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(found))
    partial.rename(path)
