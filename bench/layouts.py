"""The models and layouts that the benches of resharding use, by their sizes alone: no torch, no memory.

The layouts of Megatron's ranks and of engines' are those that the tests compare with real Megatron and real engines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # a bench is run as a script, which has only its own folder there
    sys.path.append(str(ROOT))

from tensorhub_core.layout.canonical import build_layout  # noqa: E402
from tensorhub_core.layout.types import Box, Layout, TensorSpec  # noqa: E402
from tests.engines.megatron.engine_layouts import ModelShape, engine_layout, logical_shapes  # noqa: E402
from tests.engines.megatron.trainer_layouts import Grid, trainer_layouts  # noqa: E402

QWEN3_8B = ModelShape(
    hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, vocab=151_936, ffn=12_288, qk_norm=True
)
LLAMA_70B = ModelShape(hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, vocab=128_256, ffn=28_672)
QWEN3_30B_A3B = ModelShape(
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    experts=128,
    expert_ffn=768,
    qk_norm=True,
)
MOE_1T = ModelShape(
    hidden=7168,
    layers=60,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=163_840,
    experts=384,
    expert_ffn=2048,
    shared_ffn=2048,
    qk_norm=True,
)
"""60 layers of 384 experts of 3 x 7168 x 2048, and a shared one: 1.02e12 parameters in 69,000 tensors."""


@dataclass(frozen=True)
class Case:
    """One reshard: the shards of a trainer, and one rank of an engine."""

    name: str
    sources: Callable[[], list[Layout]]
    destination: Callable[[], Layout]


SMALL = ModelShape(hidden=2048, layers=8, heads=16, kv_heads=8, head_dim=128, vocab=32_768, ffn=6144, qk_norm=True)
"""A Qwen3 of 1.07 GB: few layers and a small vocabulary, but matrices of a usual size."""


def layouts_of(model: ModelShape, kind: str) -> tuple[dict[str, tuple[int, ...]], list[Layout]]:
    """Return a model's tensors, and the layouts of all ranks: `megatron TP PP`, `fsdp RANKS` or `engine TP`."""
    name, *sizes = kind.split()
    numbers = [int(size) for size in sizes]
    if name == "megatron":
        layouts = trainer_layouts(model, Grid(tp=numbers[0], pp=numbers[1]))
    elif name == "fsdp":
        layouts = fsdp_layouts(model, *numbers)
    else:
        layouts = [engine_layout(model, numbers[0], rank) for rank in range(numbers[0])]
    return logical_shapes(model), layouts


def fsdp_layouts(model: ModelShape, ranks: int) -> list[Layout]:
    """Return what ranks hold when every tensor is divided along its rows as FSDP2 does, the last ones with fewer."""
    shapes = logical_shapes(model)
    made = []
    for rank in range(ranks):
        specs = []
        for name, shape in shapes.items():
            each = -(-shape[0] // ranks)
            begin, end = min(shape[0], rank * each), min(shape[0], (rank + 1) * each)
            if begin < end:
                local = (end - begin, *shape[1:])
                zeros = (0,) * len(shape)
                specs.append(TensorSpec(name, model.dtype, local, (Box(name, (begin, *zeros[1:]), local, zeros),)))
        made.append(build_layout(specs, shard=rank, num_shards=ranks))
    return made


def megatron_to_engine(model: ModelShape, grid: Grid, tp: int, expert_parallel: bool = False) -> Case:
    """Return the reshard of a Megatron trainer to the second rank of an engine, or its only one."""
    about = "".join(
        f"{key.upper()}{size}" for key, size in (("tp", grid.tp), ("pp", grid.pp), ("ep", grid.ep)) if size > 1
    )
    return Case(
        f"Megatron {about} to TP{tp}{' with EP' * expert_parallel}",
        lambda: trainer_layouts(model, grid),
        lambda: engine_layout(model, tp, min(1, tp - 1), expert_parallel=expert_parallel),
    )


def fsdp_to_engine(model: ModelShape, ranks: int, tp: int, expert_parallel: bool = False) -> Case:
    """Return the reshard of an FSDP2 trainer to the second rank of an engine, or its only one."""
    return Case(
        f"FSDP{ranks} to TP{tp}{' with EP' * expert_parallel}",
        lambda: fsdp_layouts(model, ranks),
        lambda: engine_layout(model, tp, min(1, tp - 1), expert_parallel=expert_parallel),
    )
