"""Make folders with `torch.distributed.checkpoint`, which is the truth in these tests, on one process or on two."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensorhub_core.checkpoint.files import Checkpoint
from tensorhub_core.layout.dtypes import dtype_bytes
from tests.unit.checkpoint.samples import name_of, random_tensor

ROOT = Path(__file__).resolve().parents[3]
WORLD = 2


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    """Save a state dict by one process, without a process group."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


class Block(torch.nn.Module):
    """Layers whose sizes two ranks cannot share evenly."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(6, 5)
        self.norm = torch.nn.Parameter(torch.empty(1 + number % 2 * 4))


class Model(torch.nn.Module):
    """A model with the names of a Hugging Face one; its weights follow from their names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(11, 6)
        self.model.layers = torch.nn.ModuleList(Block(number) for number in range(3))
        self.lm_head = torch.nn.Linear(6, 11, bias=False)
        with torch.no_grad():
            for number, (name, parameter) in enumerate(self.named_parameters()):
                dtype = torch.float32 if "norm" in name else torch.bfloat16
                parameter.data = random_tensor(torch.int16, tuple(parameter.shape), number).to(dtype) / 256

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Use every parameter."""
        hidden = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            hidden = hidden + block.proj(hidden).sum() * block.norm.sum().to(hidden.dtype)
        return self.lm_head(hidden)


def weights() -> dict[str, torch.Tensor]:
    """Return the weights of the model that the two ranks save."""
    return {name: parameter.detach() for name, parameter in Model().named_parameters()}


def divided() -> dict[str, torch.Tensor]:
    """Return tensors that are saved in parts along each axis, beside the model, by the two ranks."""
    kinds = (torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.float8_e4m3fn, torch.bool)
    return {
        f"{name_of(dtype)}.{shape}": random_tensor(dtype, shape, number)
        for number, dtype in enumerate(kinds)
        for shape in ((8, 6), (3, 5, 7), (1,), ())
    }


def save_on_two_ranks(folder: Path) -> None:
    """Save `model` (FSDP2, with its optimizer) and `divided` in `folder`."""
    # One process imports torch and divides itself.
    command = [sys.executable, "-m", "tests.unit.checkpoint.dcp_samples", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=110, check=True)


def _run(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    model = Model()
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": 7}, checkpoint_id=folder / "model")
    parts = {}
    for number, (name, tensor) in enumerate(divided().items()):
        axes = [*range(tensor.dim()), None]
        axis = axes[number % len(axes)]
        placement = Replicate() if axis is None else Shard(axis)
        parts[name] = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)  # gloo cannot send them all
    dcp.save(parts, checkpoint_id=folder / "divided")
    dist.destroy_process_group()


def assembled(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of the whole tensors, put together by boxes; no element may be given twice."""
    whole: dict[str, tuple[str, NDArray[np.uint8], NDArray[np.uint8]]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for boxes in checkpoint.boxes.values():
        for box in boxes:
            end = tuple(map(sum, zip(box.offset, box.shape, strict=True)))
            sizes[box.logical] = tuple(map(max, sizes.get(box.logical, end), end))
    for tensor in checkpoint.tensors:
        elements = tensor.buffer.reshape(*tensor.shape, dtype_bytes(tensor.dtype))
        if tensor.name not in checkpoint.boxes:
            whole[tensor.name] = (tensor.dtype, elements, np.ones(tensor.shape, np.uint8))
        for box in checkpoint.boxes.get(tensor.name, ()):
            shape = sizes[box.logical]
            empty = (tensor.dtype, np.zeros((*shape, elements.shape[-1]), np.uint8), np.zeros(shape, np.uint8))
            dtype, target, written = whole.setdefault(box.logical, empty)
            assert dtype == tensor.dtype
            spare = len(tensor.shape) - len(box.shape)
            local = (*(1,) * spare, *box.shape)
            here = tuple(slice(at, at + size) for at, size in zip(box.local_offset, local, strict=True))
            there = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
            target[there] = elements[here].reshape(*box.shape, -1)
            written[there] += 1
    assert all((written == 1).all() for _, _, written in whole.values())
    return {name: (dtype, target.shape[:-1], target.tobytes()) for name, (dtype, target, _) in whole.items()}


if __name__ == "__main__":
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.multiprocessing

    torch.multiprocessing.start_processes(_run, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
