"""Boxes derived from vLLM's own loading, with tensor and pipeline parallelism: bytewise the same as loading.

The sources are a checkpoint's tensors as three kinds of trainers hold them, see `trainers`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..models import Checkpoints

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[3]
TRACED = ("moe", "dense-tied", "dense-untied", "mla", "transposed", "bias-one-kv-head")
"""A mixture of experts first: vLLM makes the expert group only for a first model that has experts."""


GROUPS = {"one rank": (1, 1), "tensor 2": (2, 1), "tensor 4": (4, 1), "pipeline 2": (1, 2)}


@pytest.fixture(scope="module")
def groups(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run all groups, forked from one process; return the folders with their results."""
    folders = {name: tmp_path_factory.mktemp("group") for name in GROUPS}
    jobs = []
    for name, (tensor, pipeline) in GROUPS.items():
        job = {"tensor": tensor, "pipeline": pipeline, "folder": str(folders[name])}
        jobs.append({**job, "checkpoints": [str(checkpoints(kind, 1)) for kind in kinds_of(name)]})
    command = [sys.executable, "-m", "tests.engines.vllm.rank", *map(json.dumps, jobs)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            process.wait(timeout=250)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return folders


def kinds_of(group: str) -> tuple[str, ...]:
    if group == "tensor 4":  # the other one has two heads
        return tuple(kind for kind in TRACED if kind != "mla")
    return TRACED[:3] if group == "pipeline 2" else TRACED


@pytest.fixture(scope="module", params=GROUPS)
def results(request: pytest.FixtureRequest, groups: dict[str, Path]) -> list[dict[str, Any]]:
    """Every rank's result for every kind of checkpoint."""
    tensor, pipeline = GROUPS[request.param]
    lines = [path.read_text().splitlines() for path in sorted(groups[request.param].glob("*.jsonl"))]
    found = [[json.loads(line) for line in rank] for rank in lines]
    assert [len(rank) for rank in found] == [len(kinds_of(request.param))] * (tensor * pipeline), (
        "see the ranks' errors"
    )
    return [result for rank in found for result in rank]


def test_filling_by_boxes_equals_loading_bytewise(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["obstacles"] == [], result
        assert result["differences"] == [], result
        assert result["different"] == [], result
        assert result["tensors"] > 5, result


def test_tracing_touches_no_byte(results: list[dict[str, Any]]) -> None:
    assert [result["touched"] for result in results] == [[]] * len(results)


def test_nothing_is_moved_twice_and_padding_is_not_moved(results: list[dict[str, Any]]) -> None:
    """The vocabulary is no multiple of 64, so embeddings are padded; replicated KV heads lie once in each rank."""
    for result in results:
        assert result["bytes"] <= result["memory"], result
    padded = [result for result in results if result["padding"]]
    assert padded, "the vocabulary was padded"
    assert all(result["bytes"] < result["memory"] for result in padded)
