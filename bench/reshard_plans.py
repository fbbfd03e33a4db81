"""What it costs to plan a read of one layout by another, and how much is read: shapes only, no weights.

    python bench/reshard_plans.py [--cases TEXT] [--json FILE]

Each case is one rank of an engine that reads all ranks of a trainer: vLLM's fused and stacked tensors behind
Megatron's, or behind FSDP2's rows. *Exact* reads only what is needed of the trainer's segments of up to 4 MiB, as a
worker does whose sources sum parts; *whole segments* reads them as they are. Each case runs in a process of its own;
the memory of planning is what it adds at its peak to what the process had with the layouts.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from common import Row, limit, parser_of, report
from layouts import (
    LLAMA_70B,
    MOE_1T,
    QWEN3_8B,
    QWEN3_30B_A3B,
    Case,
    Grid,
    fsdp_to_engine,
    megatron_to_engine,
)

from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.plan import ExactPolicy, plan_read
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.summary import summarize
from tensorhub_core.layout.types import Box, Layout, TensorSpec

NAME = "reshard_plans"
MOST_RATIO, MOST_PLAN_S, MOST_MIB = 2.0, 10.0, 512
TIMEOUT_S = 600.0


def many(count: int, rows: int, columns: int, shards: int, index: int, segment_bytes: int, by_rows: bool) -> Layout:
    """Return one shard of `count` equal tensors, which are divided by rows or by columns."""
    shape = (rows // shards, columns) if by_rows else (rows, columns // shards)
    offset = (index * shape[0], 0) if by_rows else (0, index * shape[1])
    specs = [
        TensorSpec(f"layers.{number:05}", "bfloat16", shape, (Box(f"layers.{number:05}", offset, shape, (0, 0)),))
        for number in range(count)
    ]
    return build_layout(specs, shard=index, num_shards=shards, segment_bytes=segment_bytes)


def limits(count: int, rows: int, columns: int, segment_bytes: int) -> Case:
    """Return a reshard of 4 shards of rows to one of 2 shards of columns."""
    return Case(
        "4 by rows to 2 by columns",
        lambda: [many(count, rows, columns, 4, index, segment_bytes, True) for index in range(4)],
        lambda: many(count, rows, columns, 2, 1, segment_bytes, False),
    )


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    eight, seventy, thirty, trillion = "Qwen3-8B", "Llama-3-70B", "Qwen3-30B-A3B", "MoE of 1T"
    found = [
        (eight, megatron_to_engine(QWEN3_8B, Grid(tp=4), 2)),
        (eight, megatron_to_engine(QWEN3_8B, Grid(tp=2, pp=2), 4)),
        (eight, fsdp_to_engine(QWEN3_8B, 8, 2)),
        (seventy, megatron_to_engine(LLAMA_70B, Grid(tp=8, pp=4), 4)),
        (seventy, megatron_to_engine(LLAMA_70B, Grid(tp=4, pp=4), 8)),
        (seventy, fsdp_to_engine(LLAMA_70B, 64, 8)),
        (thirty, megatron_to_engine(QWEN3_30B_A3B, Grid(tp=2, pp=2, dp=4, ep=8), 4)),
        (thirty, megatron_to_engine(QWEN3_30B_A3B, Grid(tp=2, pp=2, dp=4, ep=8), 4, expert_parallel=True)),
        (thirty, fsdp_to_engine(QWEN3_30B_A3B, 16, 4)),
        (trillion, megatron_to_engine(MOE_1T, Grid(tp=8, pp=4, dp=4, ep=32), 16)),
        (trillion, megatron_to_engine(MOE_1T, Grid(tp=8, pp=4, dp=4, ep=32), 16, expert_parallel=True)),
        (trillion, fsdp_to_engine(MOE_1T, 8, 16)),
        ("60,000 tensors", limits(60_000, 64, 256, 4 << 20)),
        ("a million segments", limits(60, 32_768, 16_384, 64 << 10)),
    ]
    return {f"{model}, {case.name}": case for model, case in found}


def peak_bytes(reset: bool = False) -> int:
    """Return the most memory that this process had resident so far; `reset`: begin anew, where the system can."""
    own = Path("/proc/self")
    if reset and (own / "clear_refs").exists():
        gc.collect()
        (own / "clear_refs").write_text("5")
    if not (own / "status").exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    lines = (own / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def measure(name: str) -> list[dict[str, object]]:
    """Measure one case in this process."""
    case = cases()[name]
    sources, destination = case.sources(), case.destination()
    before, began = peak_bytes(reset=True), time.perf_counter()
    plan = plan_read(destination, sources, exact=ExactPolicy())
    took_s, taken_bytes = time.perf_counter() - began, peak_bytes() - before
    exact, whole = (summarize(each, destination, sources) for each in (plan, plan_read(destination, sources)))
    rows = [
        Row(f"{name}: tensors of {len(sources)} sources", sum(len(each.tensors) for each in sources), ""),
        Row(f"{name}: their segments", sum(len(segment_table(each)) for each in sources), ""),
        Row(f"{name}: needed", exact.needed_bytes / 1e9, "GB"),
        Row(f"{name}: whole segments, read / needed", whole.ratio, "x"),
        Row(f"{name}: whole segments, descriptors", whole.runs, ""),
        limit(f"{name}: exact, read / needed", exact.ratio, "x", MOST_RATIO),
        Row(f"{name}: exact, descriptors", exact.runs, ""),
        Row(f"{name}: exact, staged", exact.staged_bytes / max(1, exact.read_bytes), "of the bytes"),
        limit(f"{name}: exact, planned in", took_s, "s", MOST_PLAN_S),
        limit(f"{name}: exact, memory of planning", taken_bytes / (1 << 20), "MiB", MOST_MIB),
    ]
    return [vars_of(row) for row in rows]


def vars_of(row: Row) -> dict[str, object]:
    """Return a row's fields."""
    return {"case": row.case, "value": row.value, "unit": row.unit, "goal": row.goal, "ok": row.ok}


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--cases", default="", help="only those whose name has this text in it")
    parser.add_argument("--one", help="measure this one here, and print its rows as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return 0
    rows: list[Row] = []
    for name in cases():
        if arguments.cases in name:
            command = [sys.executable, __file__, "--one", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
            rows += [Row(**row) for row in json.loads(done.stdout)]
    report(NAME, arguments, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
