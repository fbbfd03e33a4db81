"""A process of `tensorhub bench`: it publishes or reads versions as it is told, and says how long each took.

    python -m tensorhub_core.cli.bench_worker ADDRESS ROLE NAME TRANSPORT TENSORS TENSOR_BYTES

An order is a line on stdin, `WHAT VERSION`; the answer a JSON object on stdout. It ends when its stdin does, so never
outlives its parent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client.connect import connect
from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import TensorHubError

MODEL = "bench"
_TIMEOUT_S = 100.0

Tensors = dict[str, NDArray[np.uint8]]


def make_tensors(count: int, size_bytes: int, seed: int | None) -> Tensors:
    """Return tensors in places of their own, random ones of a seed or blank ones; all their memory has been touched."""
    rng = np.random.default_rng(seed)
    names = [f"layers.{number}.weight" for number in range(count)]
    if seed is None:
        return {name: np.full(size_bytes, 255, np.uint8) for name in names}
    return {name: rng.integers(0, 256, size_bytes, np.uint8) for name in names}


def digest_of(tensors: Tensors) -> str:
    """Return a checksum of all bytes."""
    digest = xxhash.xxh3_128()
    for tensor in tensors.values():
        digest.update(tensor.data)
    return digest.hexdigest()


def change(tensors: Tensors, version: int) -> None:
    """Make the tensors those of another version: a byte in every 4 KiB differs."""
    for tensor in tensors.values():
        tensor[::4096] += np.uint8(version | 1)


def copy_s(tensors: Tensors) -> float:
    """Return what numpy's copy of all tensors takes, into memory that has been touched."""
    copies = {name: np.ones_like(tensor) for name, tensor in tensors.items()}
    began = time.perf_counter()
    for name, tensor in tensors.items():
        np.copyto(copies[name], tensor)
    return time.perf_counter() - began


def obey(worker: Worker, tensors: Tensors, what: str, version: int) -> dict[str, object]:
    """Do what an order says, and return its answer; only the call itself is timed."""
    if what == "digest":
        return {"digest": digest_of(tensors)}
    if what == "copy":
        return {"seconds": copy_s(tensors)}
    if what == "publish" and version > 1:
        change(tensors, version)
    act: dict[str, Callable[[], object]] = {
        "publish": lambda: worker.publish(version),
        "replicate": lambda: worker.replicate(version, timeout_s=_TIMEOUT_S),
        "unpublish": lambda: worker.unpublish(timeout_s=_TIMEOUT_S),
    }
    began = time.perf_counter()
    act[what]()
    return {"seconds": time.perf_counter() - began}


def main(arguments: list[str]) -> int:
    """Follow orders until stdin ends; returns the exit code."""
    address, role, name, transport, count, size_bytes = arguments

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), flush=True)

    try:
        settings = {"handover_s": 0}  # at the end nobody is to take anything over
        with connect(address, model=MODEL, replica=name, transport=transport, settings=settings) as worker:
            tensors = make_tensors(int(count), int(size_bytes), 20 if role == "publisher" else None)
            worker.register(tensors)
            say({})
            for line in sys.stdin:
                what, version = line.split()
                say(obey(worker, tensors, what, int(version)))
    except TensorHubError as error:
        say({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        return 1
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
