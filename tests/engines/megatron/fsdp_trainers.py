"""Runs on the ranks: a module that torch shards, trained and published step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorhub_core.errors import TensorHubError
from tensorhub_megatron import attach_fsdp

from .reference import Array
from .shares import array_of

WORDS, WIDTH, INNER = 13, 6, 10


class Block(nn.Module):
    """A gated MLP with a scale of one element: fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    """Two blocks between an embedding and an output layer that are tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


SHAPES = {
    "embedding.weight": (WORDS, WIDTH),
    "head.weight": (WORDS, WIDTH),
    **{f"blocks.{n}.up.weight": (INNER, WIDTH) for n in range(2)},
    **{f"blocks.{n}.up.bias": (INNER,) for n in range(2)},
    **{f"blocks.{n}.down.weight": (WIDTH, INNER) for n in range(2)},
    **{f"blocks.{n}.scale": (1,) for n in range(2)},
}


@dataclass
class Job:
    """One rank's trainer."""

    module: Any
    optimizer: torch.optim.Optimizer
    batch: int
    publisher: Any = None
    cast: Any = None


_JOBS: list[Job] = []


def build(kind: str) -> Any:
    """Return the model as a trainer of this kind has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = torch.distributed.get_world_size()
    model = Model()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "wrapped fsdp":
        return torch.compile(_from_meta(init_device_mesh("cpu", (world,))), backend="eager")
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif kind == "replicated shards":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    else:
        assert kind == "tensor parallel"
        whole = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        _tensor_parallel(model, whole["tp"])
        mesh = whole["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _wrapped(model: Model) -> Model:
    """Wrap blocks as activation checkpointing and compiling do, and freeze a part."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1].up = torch.compile(model.blocks[1].up, backend="eager")
    model.blocks[1].down.weight.requires_grad_(False)
    return model


def _from_meta(mesh: Any) -> Any:
    """Shard a model without memory in mixed precision, kept on the host, and give it memory and weights then."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mesh": mesh,
    }
    with torch.device("meta"):
        model = _wrapped(Model())
    for block in model.blocks:
        fully_shard(block, **policy, reshard_after_forward=False)
    fully_shard(model, **policy)
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(torch.distributed.tensor.distribute_tensor(whole, mesh, parameter.placements))
    return model


def _tensor_parallel(model: Model, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def begin(rank: int, kind: str, address: str, how: dict[str, Any]) -> dict[str, Array]:
    """Build, attach and return the whole weights that were published."""
    module = build(kind)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    # Ranks that are parallel in tensors see the same batch, else what each of them has whole would differ.
    batch = rank // 2 if kind == "tensor parallel" else rank
    job = Job(module, optimizer, batch, cast=torch.bfloat16 if "cast" in how else None)
    _JOBS[:] = [job]
    job.publisher = attach_fsdp(module, job.optimizer, server=address, model="m", **how)
    return _whole(job)


def train(rank: int, evaluate: bool = False) -> tuple[dict[str, Array], int]:
    """Train a step; return the whole weights, and the published version."""
    job = _JOBS[0]
    tokens = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(job.batch))
    job.optimizer.zero_grad()
    logits = job.module(tokens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    if evaluate:  # leaves the root's parameters gathered
        with torch.no_grad():
            job.module(tokens)
    job.optimizer.step()
    return _whole(job), job.publisher.version


def reload(rank: int) -> dict[str, Array]:
    """Load other weights, as a checkpoint does, and publish them as the next version."""
    job = _JOBS[0]
    job.publisher.unpublish()
    with torch.no_grad():
        for parameter in job.module.parameters():
            parameter.mul_(0.5)
    job.publisher.publish(changed=True)
    return _whole(job)


def begin_on_some(rank: int, address: str, some: list[int]) -> tuple[str, dict[str, Array]]:
    """Attach on a group's ranks; return the error on another one that tries, too."""
    group = torch.distributed.new_group(some)
    job = Job(Model(), torch.optim.SGD([torch.zeros(1)], lr=0.1), rank)
    if rank in some or rank == 0:
        try:
            job.publisher = attach_fsdp(job.module, job.optimizer, server=address, model="m", group=group)
        except TensorHubError as error:
            return f"{type(error).__name__}: {error}", {}
        _JOBS[:] = [job]
    return "", _whole(job)


def end_on_some(rank: int, some: list[int]) -> None:
    """Leave on the group's ranks."""
    if rank in some:
        end(rank)


def refusal(rank: int, kind: str, address: str) -> str:
    """Attach what is refused on one rank; return the error."""
    module = build(kind)
    if rank == 1:
        next(module.parameters()).ds_id = 3
    try:
        attach_fsdp(module, torch.optim.SGD(module.parameters(), lr=0.1), server=address, model="m")
    except TensorHubError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def end(rank: int) -> None:
    """Leave."""
    _JOBS.pop().publisher.close()


def _whole(job: Job) -> dict[str, Array]:
    """Gather every parameter, as one would without TensorHub."""
    found = {}
    for name, parameter in job.module.named_parameters(remove_duplicate=False):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "module."):
            name = name.replace(wrapper, "")
        found[name] = array_of(full.detach().to(job.cast or full.dtype))
    return found
