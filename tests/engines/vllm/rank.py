"""Groups of ranks without an engine: does filling by traced boxes, from any trainer, equal vLLM's own loading?

    python -m tests.engines.vllm.rank GROUP...

A group is a JSON object: tensor, pipeline (sizes), folder, checkpoints. This process imports vLLM once and forks every
rank; rank N writes one JSON line for each checkpoint to FOLDER/N.jsonl. Ends with the number of ranks that failed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.reading import Destination, ReadEnd, SourceAccess
from tensorhub_core.engine.logical import LogicalTensor, logical_tensors
from tensorhub_core.engine.trace import Trace, trace
from tensorhub_core.layout.plan import plan_read
from tests.engines.trainers import TRAINERS, Shard
from tests.unit.client.fake_executor import FakeExecutor

SENTINEL = 0xA5


class Quiet:
    """Hears of progress."""

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Do nothing."""


def check(config: Any, checkpoint: Path) -> dict[str, Any]:
    """Load a checkpoint by vLLM and, over other old bytes, by boxes from every trainer."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    real = load_file(checkpoint / "model.safetensors")
    sources = [
        LogicalTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in real.items()
    ]
    with set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(config)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.data.view(torch.uint8).fill_(SENTINEL)
        traced = trace(model.load_weights, parameters, sources)
        touched = [name for name, p in parameters.items() if not bool((p.data.view(torch.uint8) == SENTINEL).all())]
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    loaded = {name: parameter.data.clone() for name, parameter in parameters.items()}
    different = []
    for trainer, hold in TRAINERS.items():
        for parameter in parameters.values():
            parameter.data.view(torch.uint8).fill_(SENTINEL ^ 0xFF)
        shards = hold(real, json.loads((checkpoint / "config.json").read_text()))
        different += [f"{trainer}: {text}" for text in _fill(traced, sources, shards)]
        different += [
            f"{trainer}: {name}"
            for name, parameter in parameters.items()
            if not torch.equal(parameter.data.view(torch.uint8), loaded[name].view(torch.uint8))
        ]
    moved = sum(
        torch.Size(box.shape).numel() * traced.tensors[name].element_size()
        for name, boxes in traced.boxes.items()
        for box in boxes
    )
    return {
        "checkpoint": checkpoint.name,
        "obstacles": traced.obstacles,
        "differences": traced.differences,
        "touched": touched,
        "different": different,
        "tensors": len(traced.tensors),
        "padding": len(traced.padding),
        "bytes": moved,
        "memory": sum(parameter.nbytes for parameter in parameters.values()),
    }


def _fill(traced: Trace, sources: list[LogicalTensor], shards: list[Shard]) -> list[str]:
    """Fill the engine's memory from a trainer's as a reader does: plan, read, verify; return what went wrong."""
    count = len(shards)
    held = [
        RegisteredMemory(shard.tensors, shard.boxes, shard=number, num_shards=count)
        for number, shard in enumerate(shards)
    ]
    layouts = [memory.layout for memory in held]
    if logical_tensors(layouts) != sorted(sources, key=lambda source: source.name):
        return ["its shards make other logical tensors than the checkpoint has"]
    for view, value in traced.padding:
        view.fill_(value)
    own = RegisteredMemory(traced.tensors, traced.boxes)
    own.collect()
    sums = [memory.sums() for memory in held]
    plan = plan_read(own.layout, layouts, sums)
    access = [
        SourceAccess(f"{n}", "", b"", m.layout, m.table, m.addresses, m.devices, sums[n], len(sums[n]))
        for n, m in enumerate(held)
    ]
    destination = Destination(own.layout, own.table, own.addresses, own.devices, own.buffers)
    job = FakeExecutor().start(plan, access, destination, None, Quiet())
    job.thread.join()
    own.spread()
    assert job.outcome is not None
    return [] if job.outcome.end is ReadEnd.VERIFIED else [str(job.outcome)]


def check_all(tensor: int, pipeline: int, rank: int, folder: Path, checkpoints: list[str]) -> None:
    """Join the group and check every checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs

    for number, checkpoint in enumerate(checkpoints):
        config = EngineArgs(
            model=checkpoint,
            enforce_eager=True,
            max_model_len=256,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            distributed_executor_backend="mp" if tensor * pipeline > 1 else None,
        ).create_engine_config()
        with set_current_vllm_config(config), (folder / f"{rank}.jsonl").open("a") as output:
            if number == 0:
                init_distributed_environment(tensor * pipeline, rank, f"file://{folder / 'init'}", rank, "gloo")
                ensure_model_parallel_initialized(tensor, pipeline)
            output.write(json.dumps(check(config, Path(checkpoint))) + "\n")


def fork_rank(group: dict[str, Any], rank: int) -> int:
    """Start a rank; returns its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check_all(group["tensor"], group["pipeline"], rank, Path(group["folder"]), group["checkpoints"])
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return child


def main(groups: list[dict[str, Any]]) -> int:
    """Run one group after the other; returns how many ranks failed."""
    import vllm.entrypoints.llm  # noqa: F401  # what takes long, once for all ranks

    failed = 0
    for number, group in enumerate(groups):
        name = os.environ["VLLM_DIST_IDENT"] = f"tensorhub-trace-{os.getpid()}-{number}"
        children = [fork_rank(group, rank) for rank in range(group["tensor"] * group["pipeline"])]
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
        for left in Path("/dev/shm").glob(f"{name}*"):  # a rank ends without giving its shared memory back
            left.unlink()
    return failed


if __name__ == "__main__":
    sys.exit(main([json.loads(group) for group in sys.argv[1:]]))
