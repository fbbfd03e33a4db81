"""Compare the rate of a verified read by the executor with that of one raw NIXL read, in the same run.

    python bench/replicate_rate.py [--total-bytes N] [--rounds N] [--json FILE]

A child process serves the same bytes as 1, 300 and 20,000 tensors. Raw is one NIXL transfer with one descriptor over
all of them, without verification. Rounds alternate between the two, and the best of each counts, because other work on
the machine only slows them down. `cma` is UCX's own choice between two processes of one machine (one
reads the other's memory), `tcp` is what it does between machines without RDMA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from common import Row, machine, show
from numpy.typing import NDArray

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.reading import Destination, ReadEnd, SourceAccess
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.transport.base import Batch, PeerId, ReadState, Region, Transport
from tensorhub_core.transport.registry import make_transport

NAME = "replicate_rate"
CASES = ("1 tensor", "300 tensors", "20,000 tensors")
GOALS = {"1 tensor": 0.8, "300 tensors": 0.8}
PATHS: Mapping[str, Mapping[str, str]] = {"cma": {}, "tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}}
TIMEOUT_S = 120.0
GAP_BYTES = 128


def sizes(case: str, total_bytes: int) -> list[int]:
    """Return the bytes of each tensor: all in one, log-uniform as in a model, or 4-64 KiB in proportion."""
    chance = np.random.default_rng(7)
    if case == "1 tensor":
        return [total_bytes]
    count, low, high = (300, 1 << 10, 64 << 20) if case == "300 tensors" else (20_000, 4 << 10, 64 << 10)
    drawn = np.exp(chance.uniform(np.log(low), np.log(high), count))
    return [max(64, int(size) // 64 * 64) for size in drawn * (total_bytes / drawn.sum())]


def tensors(case: str, total_bytes: int, seed: int) -> dict[str, NDArray[np.uint8]]:
    """Return tensors of repeating random bytes, cut from one allocation so that no two of them touch."""
    block = np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8)
    lengths = sizes(case, total_bytes)
    allocation = np.empty(sum(lengths) + GAP_BYTES * len(lengths), np.uint8)
    for begin in range(0, allocation.size, block.size):
        allocation[begin : begin + block.size] = block[: allocation.size - begin]
    ends = np.cumsum(np.array(lengths) + GAP_BYTES).tolist()
    places = zip(ends, lengths, strict=True)
    return {f"{number:05}": allocation[end - length : end] for number, (end, length) in enumerate(places)}


def serve(case: str, total_bytes: int) -> None:
    """Serve a case until stdin ends: the child's side."""
    memory = RegisteredMemory(tensors(case, total_bytes, 1))
    arena = np.ones(total_bytes, np.uint8)
    transport = make_transport("nixl")
    transport.register([*memory.regions(), Region(arena.ctypes.data, arena.nbytes)])
    offer = {
        "description": transport.describe().hex(),
        "addresses": memory.addresses.tobytes().hex(),
        "sums": memory.sums().tobytes().hex(),
        "arena": arena.ctypes.data,
    }
    print(json.dumps(offer), flush=True)
    sys.stdin.read()
    transport.shutdown()


class Silent:
    """An observer that does nothing."""

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Hear nothing."""


@dataclass
class Bench:
    """One case: what is read, from where, and by whom."""

    transport: Transport
    executor: ReadExecutor
    memory: RegisteredMemory
    source: SourceAccess
    arena: NDArray[np.uint8]
    remote_arena: int
    peer: PeerId

    def raw_s(self) -> float:
        """Return the seconds of one raw read of all bytes with one descriptor."""
        runs = (np.array([n], np.uint64) for n in (self.arena.ctypes.data, self.remote_arena, self.arena.nbytes))
        started = time.perf_counter()
        read = self.transport.post(self.peer, Batch(*runs))
        while (progress := self.transport.poll(read)).state is ReadState.ACTIVE:
            time.sleep(20e-6)
        seconds = time.perf_counter() - started
        if progress.state is ReadState.FAILED or not self.transport.close(read):
            raise SystemExit(f"the raw read failed: {progress.error}")
        return seconds

    def executor_s(self) -> float:
        """Return the seconds of one verified read of all tensors."""
        memory = self.memory
        started = time.perf_counter()
        plan = plan_read(memory.layout, [self.source.layout])
        here = Destination(memory.layout, memory.table, memory.addresses, memory.devices, memory.buffers)
        outcome = self.executor.start(plan, [self.source], here, None, Silent()).wait(TIMEOUT_S)
        seconds = time.perf_counter() - started
        if outcome is None or outcome.end is not ReadEnd.VERIFIED:
            raise SystemExit(f"the read failed: {outcome}")
        return seconds


@contextlib.contextmanager
def opened(case: str, total_bytes: int) -> Iterator[Bench]:
    """Start the child and attach to it."""
    command = [sys.executable, __file__, "--serve", case, "--total-bytes", str(total_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line:
                raise SystemExit("the serving process ended without a word")
            offer = json.loads(line)
            memory = RegisteredMemory(
                {name: np.zeros_like(each) for name, each in tensors(case, total_bytes, 1).items()}
            )
            arena = np.zeros(total_bytes, np.uint8)
            transport = make_transport("nixl")
            transport.register([*memory.regions(), Region(arena.ctypes.data, arena.nbytes)])
            description = bytes.fromhex(offer["description"])
            sums = np.frombuffer(bytes.fromhex(offer["sums"]), np.uint64)
            addresses = np.frombuffer(bytes.fromhex(offer["addresses"]), np.uint64)
            devices = ("cpu",) * len(addresses)
            whole = (memory.layout, memory.table, addresses, devices, sums, len(sums))
            source = SourceAccess("lease", "source", description, *whole)
            executor = ReadExecutor(transport)
            raw = make_transport("nixl")
            raw.register([Region(arena.ctypes.data, arena.nbytes)])
            yield Bench(raw, executor, memory, source, arena, offer["arena"], raw.attach(description))
            executor.close()
            raw.shutdown()
            transport.shutdown()
        finally:
            child.kill()


def measure(total_bytes: int, rounds: int) -> list[Row]:
    """Measure all cases on all paths."""
    rows = []
    for path, environment in PATHS.items():
        os.environ.update(environment)
        for case in CASES:
            with opened(case, total_bytes) as bench:
                bench.raw_s()
                bench.executor_s()
                pairs = [(bench.raw_s(), bench.executor_s()) for _ in range(rounds)]
                size = bench.memory.total_bytes
            raw = total_bytes / min(seconds for seconds, _ in pairs)
            ours = size / min(seconds for _, seconds in pairs)
            ratio = ours / raw
            goal = GOALS.get(case)
            rows += [
                Row(f"{path}, {case}: raw NIXL", raw / 1e9, "GB/s"),
                Row(f"{path}, {case}: executor, verified", ours / 1e9, "GB/s"),
                Row(
                    f"{path}, {case}: executor / raw",
                    ratio,
                    "ratio",
                    "" if goal is None else f">= {goal}",
                    None if goal is None else ratio >= goal,
                ),
            ]
            show([(NAME, row) for row in rows[-3:]])
    return rows


def main() -> int:
    """Measure, print, write; a goal that is missed is shown, not failed: machines are noisy."""
    parser = argparse.ArgumentParser(prog=f"bench/{NAME}.py", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--total-bytes", type=int, default=1 << 30, help="bytes per case (default 1 GiB)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of both per case (default 7)")
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.total_bytes)
        return 0
    rows = measure(arguments.total_bytes, arguments.rounds)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"bench": NAME, "machine": machine(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
