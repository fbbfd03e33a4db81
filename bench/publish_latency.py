"""How long after `publish()` begins another process's `wait()` returns, against a bare ZeroMQ round trip.

    python bench/publish_latency.py [--json FILE]

Publishing reads every byte once to sum it up, so the large case shows the rate of that too.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import zmq
from common import Row, hub, main

from tensorhub_core import connect

SIZES = {"1 MB as 16 tensors": (1 << 20, 16), "512 MB as 300 tensors": (512 << 20, 300)}
ROUNDS = 40
LARGE_ROUNDS = 10
ECHO_ROUNDS = 2000
TIMEOUT_S = 60.0

WAITER = """
import sys, time
from tensorhub_core import connect
address, model, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
with connect(address, model=model, replica="waiter") as worker:
    print("ready", flush=True)
    seen = None
    for _ in range(rounds):
        seen = worker.wait(newer_than=seen, timeout_s=60)
        print(int(seen), time.monotonic_ns(), flush=True)
"""

ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
port = socket.bind_to_random_port("tcp://127.0.0.1")
print(port, flush=True)
while True:
    socket.send_multipart(socket.recv_multipart())
"""


def round_trips() -> list[float]:
    """Return the seconds of lock-step ZeroMQ round trips to another process."""
    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            socket = zmq.Context().socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(f"tcp://127.0.0.1:{int(process.stdout.readline())}")
            seconds = []
            for _ in range(ECHO_ROUNDS):
                started = time.perf_counter()
                socket.send(b"x" * 64)
                socket.recv()
                seconds.append(time.perf_counter() - started)
            socket.close()
            return seconds
        finally:
            process.kill()


def latencies(address: str, model: str, total_bytes: int, count: int, rounds: int) -> Iterator[tuple[float, float]]:
    """Yield, per version, the seconds from the call of publish() to the waiter's return, and to publish()'s own."""
    tensors = {f"t{i}": np.full(total_bytes // count, i % 251, np.uint8) for i in range(count)}
    command = [sys.executable, "-c", WAITER, address, model, str(rounds)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiter,
        connect(address, model=model, replica="trainer") as worker,
    ):
        try:
            assert waiter.stdout is not None
            if waiter.stdout.readline().strip() != "ready":
                raise RuntimeError("the waiting process did not start")
            worker.register(tensors)
            for version in range(1, rounds + 1):
                tensors["t0"][:8] = version
                started = time.monotonic_ns()
                worker.publish(version)
                returned = time.monotonic_ns()
                seen, at = (int(word) for word in waiter.stdout.readline().split())
                if seen != version:
                    raise RuntimeError(f"the waiter saw version {seen} instead of {version}")
                yield (at - started) / 1e9, (returned - started) / 1e9
                worker.unpublish(TIMEOUT_S)
        finally:
            waiter.kill()


def measure() -> list[Row]:
    """Measure round trips and publishes in one run."""
    echo_s = float(np.median(round_trips()))
    rows = [Row("bare ZeroMQ round trip, median", echo_s * 1e6, "us")]
    with hub("--retain", "0") as (address, _):
        for number, (case, (total_bytes, count)) in enumerate(SIZES.items()):
            rounds = ROUNDS if number == 0 else LARGE_ROUNDS
            visible, returned = np.array(list(latencies(address, f"m{number}", total_bytes, count, rounds))).T
            rows.append(Row(f"publish to visible, {case}, median", float(np.median(visible)) * 1e3, "ms"))
            rows.append(Row(f"publish to visible, {case}, worst of {rounds}", float(visible.max()) * 1e3, "ms"))
            rows.append(Row(f"publish() itself, {case}, median", float(np.median(returned)) * 1e3, "ms"))
            rows.append(Row(f"publish to visible, {case}, in round trips", float(np.median(visible)) / echo_s, "x"))
    return rows


if __name__ == "__main__":
    main("publish_latency", measure)
