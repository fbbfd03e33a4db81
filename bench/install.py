"""How long `Staged.install()` stops a worker, against a plain copy of the same tensors by as many threads.

    python bench/install.py [--total-bytes N] [--rounds N] [--json FILE]

A child process publishes the same bytes as 1, 300 and 20,000 tensors, version after version. Each round stages a
version, installs it (nobody reads the old copy, so there is no drain) and copies other tensors of the same sizes, in
memory that is as warm, with prepared views and waiting threads. The stall is all of `install()`: two messages to the
hub and back, the copy, the commit. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from common import Row, hub, limit, machine, show
from numpy.typing import NDArray
from replicate_rate import CASES, tensors

from tensorhub_core import Worker, connect
from tensorhub_core.client.installing import copy_threads

NAME = "install"
GOAL = 1.2
Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def publish(case: str, total_bytes: int, server: str) -> None:
    """Publish the next version for every line of stdin, until it ends: the child's side."""
    with connect(server, model=case, replica="trainer") as worker:
        worker.register(tensors(case, total_bytes, 1))
        for version, _ in enumerate(sys.stdin, 1):
            worker.unpublish()
            worker.publish(version)
            print(version, flush=True)


@contextlib.contextmanager
def publisher(case: str, total_bytes: int, server: str) -> Iterator[subprocess.Popen[str]]:
    """Run the child."""
    command = [sys.executable, __file__, "--publish", case, "--total-bytes", str(total_bytes), "--server", server]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def shares(pairs: Sequence[Pair], parts: int) -> list[list[Pair]]:
    """Cut (to, from) pairs into parts of about equal bytes."""
    total = sum(len(to) for to, _ in pairs)
    cut: list[list[Pair]] = [[] for _ in range(parts)]
    done = 0
    for to, source in pairs:
        at = 0
        while at < len(to):
            part = min(parts - 1, done * parts // total)
            stop = len(to) if part == parts - 1 else min(len(to), at + -(-total * (part + 1) // parts) - done)
            cut[part].append((to[at:stop], source[at:stop]))
            done, at = done + stop - at, stop
    return cut


class PlainCopy:
    """Copies tensors by as many threads as an install; the threads wait for it."""

    def __init__(self, to: dict[str, NDArray[np.uint8]], source: dict[str, NDArray[np.uint8]]) -> None:
        self._parts = shares([(to[name], source[name]) for name in to], copy_threads())
        self._pool = ThreadPoolExecutor(len(self._parts))
        self.seconds()

    @staticmethod
    def _copy(pairs: list[Pair]) -> None:
        for to, source in pairs:
            np.copyto(to, source)

    def seconds(self) -> float:
        """Return the seconds of one copy."""
        started = time.perf_counter()
        list(self._pool.map(self._copy, self._parts))
        return time.perf_counter() - started


def round_s(child: subprocess.Popen[str], worker: Worker, plain: PlainCopy) -> tuple[float, float]:
    """Return the seconds of one install and of one plain copy."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    version = int(child.stdout.readline())
    with worker.stage(version) as staged:
        plain_s = plain.seconds()
        started = time.perf_counter()
        staged.install()
        return time.perf_counter() - started, plain_s


def measure(total_bytes: int, rounds: int) -> list[Row]:
    """Measure all cases."""
    rows = []
    with hub("--retain", "0") as (server, _):
        for case in CASES:
            to, source = ({name: each.copy() for name, each in tensors(case, total_bytes, s).items()} for s in (2, 3))
            with (
                publisher(case, total_bytes, server) as child,
                connect(server, model=case, replica="reader") as worker,
            ):
                worker.register({name: torch.from_numpy(each) for name, each in to.items()})
                plain = PlainCopy(to, source)
                round_s(child, worker, plain)
                pairs = [round_s(child, worker, plain) for _ in range(rounds)]
            stall, copy = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            rows += [
                Row(f"{case}: stall of install()", stall * 1e3, "ms"),
                Row(f"{case}: plain copy, {copy_threads()} threads", copy * 1e3, "ms"),
                limit(f"{case}: install / plain copy", ratio, "ratio", GOAL),
            ]
            show([(NAME, row) for row in rows[-3:]])
            del to, source, plain
    return rows


def main() -> int:
    """Measure, print, write; a goal that is missed is shown, not failed: machines are noisy."""
    parser = argparse.ArgumentParser(prog=f"bench/{NAME}.py", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--total-bytes", type=int, default=1 << 30, help="bytes per case (default 1 GiB)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per case (default 7)")
    parser.add_argument("--publish", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.publish, arguments.total_bytes, arguments.server)
        return 0
    rows = measure(arguments.total_bytes, arguments.rounds)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"bench": NAME, "machine": machine(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
