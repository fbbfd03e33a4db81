"""What a model of 60,000 tensors costs beside its bytes: describing, planning, and what is sent about it.

    python bench/planning.py [--tensors N] [--json FILE]

A mixture-of-experts model with many experts has so many. The tensors are small here (4 KiB), because only their number
counts. *Raw* is a plan between equal layouts, *resharding* one from two shards into whole tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from common import Row, hub, parser_of, report, skipped
from numpy.typing import NDArray

from tensorhub_core import connect
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.errors import TransportError
from tensorhub_core.layout.canonical import build_layout, decode_layout, encode_layout
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Box, TensorSpec
from tensorhub_core.transport.registry import make_transport

NAME = "planning"
ROWS, COLUMNS = 64, 32
EXPERTS = 256
TRANSPORTS = ("nixl", "tcp", "cma", "auto")
REPEAT = 3
Value = TypeVar("Value")


def names(count: int) -> Iterator[str]:
    """Name the weights of many experts as Hugging Face does."""
    for number in range(count):
        layer, rest = divmod(number, 3 * EXPERTS)
        expert, kind = divmod(rest, 3)
        yield f"model.layers.{layer}.mlp.experts.{expert}.{('gate', 'up', 'down')[kind]}_proj.weight"


def shard_specs(count: int, shard: int) -> list[TensorSpec]:
    """Describe one of two shards: every tensor is cut along its rows."""
    half = ROWS // 2
    boxes = lambda name: (Box(name, (shard * half, 0), (half, COLUMNS), (0, 0)),)  # noqa: E731
    return [TensorSpec(name, "bfloat16", (half, COLUMNS), boxes(name)) for name in names(count)]


def fastest(call: Callable[[], Value]) -> tuple[float, Value]:
    """Return the median seconds of a call, and its value."""
    seconds = []
    for _ in range(REPEAT):
        began = time.perf_counter()
        value = call()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)), value


def measure_layouts(count: int) -> list[Row]:
    """Measure what a reader does before it reads."""
    specs = [TensorSpec(name, "bfloat16", (ROWS, COLUMNS)) for name in names(count)]
    built_s, whole = fastest(lambda: build_layout(specs, shard=0, num_shards=1))
    encoded_s, blob = fastest(lambda: encode_layout(whole))
    decoded_s, _ = fastest(lambda: decode_layout(blob))
    table_s, table = fastest(lambda: segment_table(whole))
    raw_s, raw = fastest(lambda: plan_read(whole, [whole]))
    halves = [build_layout(shard_specs(count, shard), shard=shard, num_shards=2) for shard in range(2)]
    reshard_s, reshard = fastest(lambda: plan_read(whole, halves))
    if len(raw) != len(table) or len(reshard) < len(table):
        raise SystemExit("the plans do not read every tensor")
    return [
        Row("build the layout", built_s * 1e3, "ms"),
        Row("encode the layout", encoded_s * 1e3, "ms"),
        Row("decode and check the layout", decoded_s * 1e3, "ms"),
        Row("cut into segments", table_s * 1e3, "ms"),
        Row("plan, raw", raw_s * 1e3, "ms"),
        Row("plan, resharding", reshard_s * 1e3, "ms"),
        Row("layout blob", len(blob) / 1e3, "kB"),
        Row("layout blob, per tensor", len(blob) / count, "B"),
        Row("checksums of a version", 8 * len(table) / 1e3, "kB"),
    ]


def arrays(count: int, apart: bool) -> dict[str, NDArray[np.uint16]]:
    """Return the tensors, each an allocation of its own or all in one."""
    if apart:
        return {name: np.zeros((ROWS, COLUMNS), np.uint16) for name in names(count)}
    block = np.zeros((count, ROWS, COLUMNS), np.uint16)
    return {name: block[number] for number, name in enumerate(names(count))}


def measure_memory(count: int) -> list[Row]:
    """Measure what is registered, and what peers are told of where it lies."""
    rows = []
    for case, apart in (("one allocation", False), ("an allocation each", True)):
        tensors = arrays(count, apart)
        described_s, memory = fastest(lambda tensors=tensors: RegisteredMemory(tensors))
        regions = memory.regions()
        rows.append(Row(f"{case}: describe the tensors", described_s * 1e3, "ms"))
        rows.append(Row(f"{case}: regions to register", len(regions), "regions"))
        rows.append(Row(f"{case}: placement blob without the description", len(memory.placement("", b"")) / 1e3, "kB"))
        for name in TRANSPORTS:
            try:
                transport = make_transport(name)
            except (TransportError, ImportError) as error:
                skipped(NAME, name, str(error))
                continue
            try:
                began = time.perf_counter()
                transport.register(regions)
                registered_s = time.perf_counter() - began
                agent = transport.describe()
            finally:
                transport.shutdown()
            rows.append(Row(f"{case}: register with {name}", registered_s * 1e3, "ms"))
            rows.append(Row(f"{case}: description by {name}", len(agent) / 1e3, "kB"))
    return rows


def measure_worker(count: int) -> list[Row]:
    """Measure a worker's calls with a hub: each sends what is new about the tensors."""
    rows = []
    with (
        hub("--log-level", "warning", "--retain", "0") as (address, _),
        connect(address, model="m", replica="trainer") as worker,
    ):
        tensors = arrays(count, apart=False)
        for call, act in (
            ("register()", lambda: worker.register(tensors)),
            ("first publish()", lambda: worker.publish(1)),
            ("unpublish()", lambda: worker.unpublish(60)),
            ("second publish()", lambda: worker.publish(2)),
        ):
            began = time.perf_counter()
            act()
            rows.append(Row(f"worker's {call}", (time.perf_counter() - began) * 1e3, "ms"))
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--tensors", type=int, default=60_000, help="how many (default 60,000)")
    arguments = parser.parse_args()
    count = arguments.tensors
    report(NAME, arguments, [*measure_layouts(count), *measure_memory(count), *measure_worker(count)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
