"""Groups of ranks without an engine: does filling by traced boxes equal vLLM's own loading?

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

from tensorhub_core.engine.logical import LogicalTensor
from tensorhub_core.engine.trace import trace

SENTINEL = 0xA5


def check(config: Any, checkpoint: Path) -> dict[str, Any]:
    """Load a checkpoint twice, by boxes and by vLLM, over different old bytes."""
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
        by_boxes = _fill(traced, real, parameters)
        for parameter in parameters.values():
            parameter.data.view(torch.uint8).fill_(SENTINEL ^ 0xFF)
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    different = [
        name
        for name, parameter in parameters.items()
        if not torch.equal(parameter.data.view(torch.uint8), by_boxes[name].view(torch.uint8))
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


def _fill(traced: Any, real: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for view, value in traced.padding:
        view.fill_(value)
    for name, tensor in traced.tensors.items():
        for box in traced.boxes[name]:
            part = real[box.logical][
                tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
            ]
            shape = (1,) * (tensor.dim() - part.dim()) + tuple(part.shape)
            window = tuple(slice(at, at + size) for at, size in zip(box.local_offset, shape, strict=True))
            tensor[window].copy_(part.reshape(shape))
    return {name: parameter.data.clone() for name, parameter in parameters.items()}


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
    for group in groups:
        children = [fork_rank(group, rank) for rank in range(group["tensor"] * group["pipeline"])]
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return failed


if __name__ == "__main__":
    sys.exit(main([json.loads(group) for group in sys.argv[1:]]))
