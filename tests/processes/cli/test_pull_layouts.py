"""`pull` writes whole tensors from whatever layouts a version is held in, or says why it cannot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from tensorhub_core import connect
from tensorhub_core.client.worker import Worker
from tensorhub_core.layout.types import Box
from tests.processes.cli.commands import tensorhub


@contextlib.contextmanager
def replica(hub: str, model: str, num_shards: int, replica: str = "engine") -> Iterator[list[Worker]]:
    """Connect all shards of a replica."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(connect(hub, model=model, replica=replica, shard=shard, num_shards=num_shards))
            for shard in range(num_shards)
        ]


def publish_all(workers: list[Worker], version: int) -> None:
    """Publish every shard at once, as the workers of a replica do."""
    threads = [threading.Thread(target=worker.publish, args=(version,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def test_fused_and_sharded_engine_tensors_become_whole_ones(hub: str, model: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 12, generator=generator, dtype=torch.bfloat16) for rows in (8, 4, 4))
    down = torch.randn(12, 16, generator=generator, dtype=torch.bfloat16)
    norm = torch.randn(12, generator=generator)
    with replica(hub, model, 2) as workers:
        for shard, worker in enumerate(workers):
            qs, ks, vs = q.chunk(2)[shard], k.chunk(2)[shard], v.chunk(2)[shard]
            padding = torch.full((3, 12), float("nan"), dtype=torch.bfloat16)
            tensors = {
                "qkv": torch.cat([qs, ks, vs, padding]),
                "down": down.chunk(2, dim=1)[shard].contiguous(),
                "norm": norm.clone(),
            }
            boxes = {
                "qkv": [
                    Box("q_proj.weight", (4 * shard, 0), (4, 12), (0, 0)),
                    Box("k_proj.weight", (2 * shard, 0), (2, 12), (4, 0)),
                    Box("v_proj.weight", (2 * shard, 0), (2, 12), (6, 0)),
                ],
                "down": [Box("down_proj.weight", (0, 8 * shard), (12, 8), (0, 0))],
                "norm": [Box("norm.weight", (0,), (12,), (0,))],
            }
            worker.register(tensors, boxes=boxes)
        publish_all(workers, 5)
        pulled = tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub)
    assert pulled.code == 0, pulled.err
    assert pulled.out == f"pulled {model} 5 to {tmp_path / 'out'}\n"
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    expected = {"q_proj": q, "k_proj": k, "v_proj": v, "down_proj": down, "norm": norm}
    assert sorted(found) == sorted(f"{name}.weight" for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(found[f"{name}.weight"], tensor), name


def test_an_engine_that_holds_only_a_part_is_told_so(hub: str, model: str, tmp_path: Path) -> None:
    with replica(hub, model, 1) as (worker,):
        worker.register({"w": np.zeros((4, 4), np.float32)}, boxes={"w": [Box("whole", (4, 0), (4, 4), (0, 0))]})
        worker.publish(1)
        error = tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub).error
    assert "cannot be written as whole tensors" in error
    assert "whole" in error
    assert list(tmp_path.iterdir()) == []


def test_half_a_version_is_none(hub: str, model: str, tmp_path: Path) -> None:
    with replica(hub, model, 2, "trainer") as workers:
        workers[0].register({"w": np.zeros(4, np.float32)})
        workers[0].publish(7)
        error = tensorhub("pull", "--model", model, "--version", 7, "--out", tmp_path / "out", "--server", hub).error
    assert "7" in error
    assert list(tmp_path.iterdir()) == []


def test_tied_names_are_all_written(hub: str, model: str, tmp_path: Path) -> None:
    embed = torch.randn(50, 8).to(torch.bfloat16)
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": embed, "norm.weight": torch.ones(8)}
    with replica(hub, model, 1, "trainer") as (worker,):
        worker.register(tensors)
        worker.publish(1)
        assert tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub).code == 0
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_safetensors_cannot_store_is_refused_before_anything_moves(hub: str, model: str, tmp_path: Path) -> None:
    with replica(hub, model, 1, "trainer") as (worker,):
        worker.register({"z": np.zeros(4, np.complex128)})
        worker.publish(1)
        error = tensorhub("pull", "--model", model, "--out", tmp_path / "out", "--server", hub).error
    assert "'z'" in error
    assert "complex128" in error
    assert list(tmp_path.iterdir()) == []


def test_floating_tensors_are_written_in_the_dtype_that_is_asked_for(hub: str, model: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": torch.randn(64, 33, generator=generator),
        "half": torch.randn(7, generator=generator, dtype=torch.float16),
        "ids": torch.arange(9),
    }
    with replica(hub, model, 1) as (worker,):
        worker.register({name: tensor.clone() for name, tensor in tensors.items()})
        worker.publish(1)
        arguments = ("pull", "--model", model, "--out", tmp_path / "out", "--server", hub)
        refused = tensorhub(*arguments, "--cast", "int8")
        pulled = tensorhub(*arguments, "--cast", "bf16")
    assert refused.code == 2
    assert "cast must be" in refused.err
    assert pulled.code == 0, pulled.err
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()}
    assert all(found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in expected.items())
