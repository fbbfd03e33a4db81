"""A program of `tensorhub demo`: a trainer or a reader, as a process of its own.

    python -m tensorhub_core.cli.demo_worker ADDRESS ROLE NAME TENSORS TENSOR_BYTES PERIOD_S

Writes what it does to stdout, one JSON object a line, and ends when its stdin does, so never outlives its parent.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.connect import connect
from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import DeadlineExceeded, TensorHubError, VersionUnavailable

MODEL = "demo"
_LOOK_EVERY_S = 0.5
_AGAIN_S = 0.05

Tensors = dict[str, NDArray[np.float32]]
Say = Callable[..., None]


def base_tensors(count: int, size_bytes: int) -> Tensors:
    """Return the numbers that version 1 holds; every process makes the same ones."""
    rng = np.random.default_rng(20)
    return {f"layers.{n}.weight": rng.random(size_bytes // 4, dtype=np.float32) for n in range(count)}


def is_version(tensors: Tensors, base: Tensors, version: int) -> bool:
    """Tell whether every number is that of `version`: version v holds v times the base."""
    return all(np.array_equal(tensors[name], base[name] * np.float32(version)) for name in base)


def train(worker: Worker, base: Tensors, say: Say, stop: threading.Event, period_s: float) -> None:
    """Publish version after version from the same memory, one each `period_s`, until `stop`."""
    tensors = {name: tensor.copy() for name, tensor in base.items()}
    worker.register(tensors)
    version = 1
    while True:
        worker.publish(version)
        say("published", version=version, bytes=sum(tensor.nbytes for tensor in tensors.values()))
        if stop.wait(period_s):
            return
        began = time.monotonic()
        worker.unpublish()
        say("unpublished", version=version, seconds=time.monotonic() - began)
        version += 1
        for name, tensor in tensors.items():
            np.multiply(base[name], np.float32(version), out=tensor)


def follow(worker: Worker, base: Tensors, say: Say, stop: threading.Event) -> None:
    """Fill the same memory with every newer version, from whoever has it, until `stop`."""
    tensors = {name: np.zeros_like(tensor) for name, tensor in base.items()}
    worker.register(tensors)
    version = None
    while not stop.is_set():
        try:
            worker.wait(newer_than=version, timeout_s=_LOOK_EVERY_S)
            version = update(worker, tensors, base, say)
        except DeadlineExceeded:
            continue  # nothing newer yet
        except VersionUnavailable:
            stop.wait(_AGAIN_S)  # it was taken back before this reader asked for it: the next one comes


def update(worker: Worker, tensors: Tensors, base: Tensors, say: Say) -> int:
    """Get the newest version, check every number and tell who it came from; returns the version."""
    sources: set[str] = set()

    def note(_done_bytes: int, _total_bytes: int, source: str) -> None:
        sources.add(source)

    began = time.monotonic()
    version = worker.update(progress=note)
    seconds = time.monotonic() - began
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    right = is_version(tensors, base, version)
    say("filled", version=version, bytes=total_bytes, seconds=seconds, sources=sorted(sources), right=right)
    return version


def main(arguments: list[str]) -> int:
    """Run one role until stdin ends; returns the exit code."""
    address, role, name, count, size_bytes, period_s = arguments
    stop = threading.Event()

    def listen() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=listen, name="parent", daemon=True).start()

    def say(event: str, **facts: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"event": event, "who": name, **facts}), flush=True)

    base = base_tensors(int(count), int(size_bytes))
    try:
        # At the end of the demo nobody is to take anything over.
        with connect(address, model=MODEL, replica=name, settings={"handover_s": 0}) as worker:
            if role == "trainer":
                train(worker, base, say, stop, float(period_s))
            else:
                follow(worker, base, say, stop)
    except TensorHubError as error:
        say("failed", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
