"""Boxes of shards say where torch itself puts them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tensorhub_core.errors import ConfigError, RegistrationError
from tensorhub_megatron.fsdp import ShardedWeights
from tensorhub_megatron.sharded import boxes_of_shard, named_shards


@dataclass(frozen=True)
class Mesh:
    """What is asked of a DeviceMesh."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate

    def size(self, axis: int) -> int:
        return self.shape[axis]


@dataclass(frozen=True)
class Distributed:
    """What is asked of a DTensor."""

    shape: torch.Size
    placements: tuple[Any, ...]
    device_mesh: Mesh
    local: torch.Tensor

    def to_local(self) -> torch.Tensor:
        return self.local


def shard_with_torch(whole: torch.Tensor, placements: tuple[Any, ...], mesh: Mesh) -> Distributed:
    """Divide a tensor by the placements' own code, one mesh axis after the other."""
    local = whole
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(local, mesh.shape[axis], with_padding=False, contiguous=True)
            local = parts[mesh.coordinate[axis]]
    return Distributed(whole.shape, placements, mesh, local)


CASES = {
    "fsdp": ((2,), (Shard(0),)),
    "fsdp, second axis": ((2,), (Shard(1),)),
    "more ranks than rows": ((8,), (Shard(0),)),
    "replicated": ((3,), (Replicate(),)),
    "replicas of shards": ((2, 3), (Replicate(), Shard(0))),
    "fsdp of rows, tensor parallel columns": ((2, 2), (Shard(0), Shard(1))),
    "fsdp on tensor parallel rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "fsdp of 3 on tensor parallel rows": ((3, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "rows that do not follow each other": ((2,), (_StridedShard(0, split_factor=3),)),
}


@pytest.mark.parametrize("shape", [(12, 6), (7, 4), (5, 3), (1, 2), (0, 4)])
@pytest.mark.parametrize("case", CASES)
def test_boxes_of_all_ranks_rebuild_the_tensor(case: str, shape: tuple[int, ...]) -> None:
    mesh_shape, placements = CASES[case]
    whole = torch.arange(1, 1 + int(np.prod(shape))).reshape(shape)
    found = np.zeros(shape, np.int64)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        parameter = shard_with_torch(whole, placements, Mesh(mesh_shape, coordinate))
        boxes = boxes_of_shard("w", "logical", parameter)
        local = parameter.local.numpy()
        covered = 0
        for box in boxes:
            assert box.logical == "logical"
            at = tuple(slice(begin, begin + size) for begin, size in zip(box.offset, box.shape, strict=True))
            here = tuple(slice(begin, begin + size) for begin, size in zip(box.local_offset, box.shape, strict=True))
            assert not found[at].any() or (found[at] == local[here]).all()
            found[at] = local[here]
            covered += int(np.prod(box.shape))
        assert covered == local.size
    assert (found == whole.numpy()).all()


@pytest.mark.parametrize("shape", [(12, 6), (7, 4), (5, 3)])
@pytest.mark.parametrize("case", [case for case in CASES if case != "rows that do not follow each other"])
def test_a_shard_in_one_piece_begins_where_torch_says(case: str, shape: tuple[int, ...]) -> None:
    mesh_shape, placements = CASES[case]
    whole = torch.zeros(shape)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        boxes = boxes_of_shard("w", "w", shard_with_torch(whole, placements, Mesh(mesh_shape, coordinate)))
        local_shape, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
        expected = [(tuple(offset), tuple(local_shape), (0, 0))] if all(local_shape) else []
        assert [(box.offset, box.shape, box.local_offset) for box in boxes] == expected


def test_what_cannot_be_described_is_refused_by_name() -> None:
    whole = torch.zeros(4, 4)
    with pytest.raises(RegistrationError, match="'w' is a sum that was not reduced yet"):
        boxes_of_shard("w", "w", Distributed(whole.shape, (Partial(),), Mesh((2,), (0,)), whole))
    with pytest.raises(RegistrationError, match="'w' is distributed over a mesh without this rank"):
        boxes_of_shard("w", "w", Distributed(whole.shape, (Shard(0),), Mesh((2,), None), whole))
    with pytest.raises(RegistrationError, match="'w' has a local shard of shape"):
        boxes_of_shard("w", "w", Distributed(whole.shape, (Shard(0),), Mesh((2,), (0,)), whole))

    linear = torch.nn.Linear(2, 2)
    linear.weight.ds_id = 3
    with pytest.raises(RegistrationError, match="'weight' is partitioned by DeepSpeed"):
        named_shards(linear)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.small = torch.nn.Parameter(torch.rand(3).to(torch.bfloat16))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.none = torch.nn.Parameter(torch.zeros(0, 4))
        self.count = torch.nn.Parameter(torch.arange(4), requires_grad=False)


def test_copies_are_torchs_own_rounding_and_follow_each_step() -> None:
    torch.manual_seed(0)
    model = Tied()
    weights = ShardedWeights(model, "bf16")
    registered = weights.describe()
    tensors = dict(registered.tensors)
    assert set(tensors) == {"embedding.weight", "head.weight", "small", "empty", "none", "count"}
    assert tensors["embedding.weight"] is tensors["head.weight"]
    assert tensors["small"].data_ptr() == model.small.data_ptr()
    assert tensors["count"].data_ptr() == model.count.data_ptr()
    assert tensors["empty"] is not tensors["none"]
    assert not {"empty", "none"} & registered.boxes.keys()  # nothing else says that there is one of that name
    for _ in range(2):
        assert torch.equal(tensors["head.weight"], model.head.weight.detach().to(torch.bfloat16))
        assert not weights.moved()
        with torch.no_grad():
            model.head.weight.copy_(torch.randn(6, 4))
        weights.refresh()


def test_memory_that_was_exchanged_is_noticed() -> None:
    model = torch.nn.Linear(4, 4)
    weights = ShardedWeights(model)
    assert weights.describe().tensors["weight"] is model.weight
    assert not weights.moved()
    model.weight.data = model.weight.data.clone()
    assert weights.moved()
    weights.describe()
    model.weight = torch.nn.Parameter(model.weight.detach().clone())
    assert weights.moved()
    assert weights.describe().tensors["weight"] is model.weight
    model.weight.untyped_storage().resize_(0)
    assert weights.moved()


def test_a_type_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="cast must be one of bf16"):
        ShardedWeights(torch.nn.Linear(2, 2), "int4")
