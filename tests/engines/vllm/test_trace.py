"""Boxes derived from vLLM's own loading, with tensor and pipeline parallelism: bytewise the same as loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .models import Checkpoints

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[3]
TRACED = ("moe", "dense-tied", "dense-untied", "mla", "transposed", "bias-one-kv-head")
"""A mixture of experts first: vLLM makes the expert group only for a first model that has experts."""


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (1, 2)], ids=["one rank", "tensor 2", "pipeline 2"])
def results(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Every rank's result for every kind of checkpoint."""
    init = tmp_path_factory.mktemp("ranks") / "init"
    tensor, pipeline = request.param
    kinds = TRACED if pipeline == 1 else TRACED[:3]
    folders = [str(checkpoints(kind, 1)) for kind in kinds]
    environment = {**os.environ, "VLLM_DIST_IDENT": "tensorhub-trace"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.engines.vllm.rank",
                str(tensor),
                str(pipeline),
                str(rank),
                str(init),
                *folders,
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(tensor * pipeline)
    ]
    try:
        outputs = [process.communicate(timeout=250)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith("{")]
    assert len(found) == len(kinds) * tensor * pipeline, outputs
    return found


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
