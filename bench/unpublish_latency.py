"""How long `unpublish()` takes: when nobody reads, after its last reader's end, and when a copy has to be made first.

    python bench/unpublish_latency.py [--json FILE]

A trainer cannot step before it returns. With a reader it is called in the middle of a read, which is let to its end.
A trainer that is the only holder of a retained version makes a copy in host memory; beside it, numpy's copy of the same
tensors into as much memory that nobody has touched before.
"""

from __future__ import annotations

import time

import numpy as np
from common import Row, hub, limit, main
from content import make
from remote import Remote

from tensorhub_core import connect

TOTAL_BYTES, COUNT = 512 << 20, 300
IDLE_ROUNDS, READ_ROUNDS, KEEP_ROUNDS = 30, 10, 9
TIMEOUT_S = 60.0


def idle(address: str) -> list[float]:
    """Return the seconds of unpublish() without readers."""
    seconds = []
    with connect(address, model="idle", replica="trainer") as worker:
        worker.register(make(1 << 20, 16, 1))
        for version in range(1, IDLE_ROUNDS + 1):
            worker.publish(version)
            began = time.perf_counter()
            worker.unpublish(TIMEOUT_S)
            seconds.append(time.perf_counter() - began)
    return seconds


def read(address: str) -> list[tuple[float, float]]:
    """Return, per round, how long unpublish() took in the middle of a read, and how long after replicate() it ended."""
    figures = []
    with connect(address, model="read", replica="trainer") as worker, Remote("nodes.py") as reader:
        worker.register(make(TOTAL_BYTES, COUNT, 1))
        reader.do("connect", server=address, model="read", replica="reader")
        reader.do("make", total_bytes=TOTAL_BYTES, count=COUNT, seed=1, blank=True)
        reader.do("register")
        for version in range(1, READ_ROUNDS + 1):
            worker.publish(version)
            reading = reader.begin("replicate", timeout_s=TIMEOUT_S, update=True)
            reader.events.get(timeout=TIMEOUT_S)  # the first one comes when the read begins
            began = time.monotonic()
            worker.unpublish(TIMEOUT_S)
            ended = time.monotonic()
            figures.append((ended - began, ended - reading.result(TIMEOUT_S)["ended_s"]))
            while not reader.events.empty():
                reader.events.get()
            reader.do("unpublish", timeout_s=TIMEOUT_S)
    return figures


def keep(address: str) -> list[tuple[float, float]]:
    """Return, per round, the seconds of unpublish() of a lone trainer, and of a plain copy."""
    figures = []
    with connect(address, model="keep", replica="trainer") as worker:
        tensors = make(TOTAL_BYTES, COUNT, 1)
        worker.register(tensors)
        for version in range(1, KEEP_ROUNDS + 1):
            worker.publish(version)  # which lets the copy of the version before go
            time.sleep(0.3)
            began = time.perf_counter()
            worker.unpublish(TIMEOUT_S)
            took = time.perf_counter() - began
            began = time.perf_counter()
            copies = [tensor.copy() for tensor in tensors.values()]
            figures.append((took, time.perf_counter() - began))
            del copies
    return figures


def measure() -> list[Row]:
    """Measure all three."""
    with hub("--log-level", "warning", "--retain", "0") as (address, _):
        alone = np.array(idle(address))
        took, after = np.array(read(address)).T
    with hub("--log-level", "warning", "--retain", "1") as (address, _):
        kept, copied = np.array(keep(address)).T
    rate = TOTAL_BYTES / float(np.median(kept)) / 1e9
    return [
        Row(f"unpublish() that makes a copy of {TOTAL_BYTES >> 20} MiB, median", float(np.median(kept)) * 1e3, "ms"),
        Row("that copy", rate, "GB/s"),
        limit("its time, of a plain copy's", float(np.median(kept / copied)), "x", 1.5),
        Row("unpublish() without readers, median", float(np.median(alone)) * 1e3, "ms"),
        Row(f"unpublish() without readers, worst of {IDLE_ROUNDS}", float(alone.max()) * 1e3, "ms"),
        Row(
            f"unpublish() in the middle of a read of {TOTAL_BYTES >> 20} MiB, median",
            float(np.median(took)) * 1e3,
            "ms",
        ),
        Row("returns after the reader's replicate(), median", float(np.median(after)) * 1e3, "ms"),
        Row(f"returns after the reader's replicate(), worst of {READ_ROUNDS}", float(after.max()) * 1e3, "ms"),
    ]


if __name__ == "__main__":
    main("unpublish_latency", measure)
