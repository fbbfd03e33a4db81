"""What the hub can do: requests a second beside a plain ROUTER echo, and how soon everybody hears of a version.

    python bench/control_plane.py [--workers 10,100,1000] [--rounds N] [--json FILE]

Workers are connections that speak the protocol, so that a thousand of them fit into one process beside the hub's. The
echo is the limit of the same sockets with the same frames: a process that sends back what it receives, no more.
Echo and hub answer in turn, round after round, each while the other one has nothing to do; a ratio is the median of the
ratios of the rounds. Versions are published while every worker waits for one; then all of them join a round at once, as
engines do that follow a trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import zmq
from common import Row, at_least, hub, parser_of, report
from memory_server import Connection, resident_mb

from tensorhub_core.layout.canonical import build_layout, digest_of, encode_layout
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Placement, TensorSpec
from tensorhub_core.state.messages import (
    PROTOCOL,
    Available,
    Heartbeat,
    Hello,
    JoinRound,
    LeaveRound,
    Offload,
    Offloaded,
    Promise,
    Publish,
    PutBlob,
    Register,
    Unpublish,
    Wait,
    Welcome,
)
from tensorhub_core.wire.codec import decode_reply, split

NAME = "control_plane"
WORKERS = (10, 100, 1000)
REQUESTS = 20_000
VERSIONS = 20
ECHO_GOAL = 0.5
ECHO = """
import sys, zmq
context = zmq.Context()
context.set(zmq.MAX_SOCKETS, 64)
router = context.socket(zmq.ROUTER)
router.setsockopt(zmq.BACKLOG, 4096)
router.bind("tcp://127.0.0.1:0")
print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
while True:
    router.send_multipart(router.recv_multipart())
"""


class Shape(NamedTuple):
    """What every worker registers: blobs and sizes."""

    layout: bytes
    sums: tuple[bytes, ...]
    storages: int
    total_bytes: int
    segments: int


@contextlib.contextmanager
def echo() -> Iterator[str]:
    """Run a plain echo; yields its address."""
    with subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def shape(versions: int) -> Shape:
    """Describe a small model; its checksums differ from version to version."""
    layout = build_layout([TensorSpec("weight", "bfloat16", (1 << 20,))], shard=0, num_shards=1)
    table = segment_table(layout)
    sums = tuple(np.full(len(table), number, "<u8").tobytes() for number in range(versions + 1))
    return Shape(encode_layout(layout), sums, len(layout.storages), table.total_bytes, len(table))


def placement_of(number: int, shape: Shape) -> bytes:
    """Return where a worker's memory lies; made up."""
    addresses = (np.arange(shape.storages, dtype="<u8") + number * shape.storages) * 4096
    return msgspec.msgpack.encode(Placement("tcp", b"a" * 200, addresses.tobytes(), ("cpu",), bytes(shape.storages)))


def join_hub(worker: Connection, number: int, shape: Shape, replica: str) -> None:
    """Say hello and register made-up memory."""
    placement = placement_of(number, shape)
    welcome = worker.ask(Hello(PROTOCOL, f"token-{replica}", "policy", replica, host=f"host-{number // 8}"))
    assert isinstance(welcome, Welcome)
    for blob in (shape.layout, placement):
        worker.ask(PutBlob(digest_of(blob), blob))
    worker.ask(Register(digest_of(shape.layout), digest_of(placement), shape.total_bytes, shape.segments))


def withdraw(trainer: Connection, placement: bytes) -> None:
    """Take a version back; if the hub wants it kept, say that there is an offload copy of it."""
    number = trainer.send(Unpublish())
    while True:
        frames = split(trainer.receive_raw())
        reply = decode_reply(frames)
        if isinstance(reply, Offload):
            trainer.send(Offloaded(reply.copy, digest_of(placement)))
        elif frames.request == number:
            return


def rate(workers: Sequence[Connection], requests: int) -> float:
    """Return requests a second when each worker has one on its way all the time."""
    rounds = max(1, requests // len(workers))
    began = time.perf_counter()
    for worker in workers:
        worker.send(Heartbeat())
    for _ in range(rounds - 1):
        for worker in workers:
            worker.receive_raw()
            worker.send(Heartbeat())
    for worker in workers:
        worker.receive_raw()
    return rounds * len(workers) / (time.perf_counter() - began)


def rates(address: str, workers: Sequence[Connection], rounds: int) -> list[Row]:
    """Compare the hub's requests a second with an echo's."""
    with echo() as other, contextlib.ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 2 * len(workers) + 64)
        stack.callback(context.destroy, linger=0)
        plain = [Connection(context, other) for _ in workers]
        rate(plain, len(plain)), rate(workers, len(workers))
        figures = [(rate(workers, REQUESTS), rate(plain, REQUESTS)) for _ in range(rounds)]
    count = len(workers)
    return [
        Row(f"{count} workers: hub", statistics.median(ours for ours, _ in figures), "requests/s"),
        Row(f"{count} workers: echo", statistics.median(limit for _, limit in figures), "requests/s"),
        at_least(f"{count} workers: hub / echo", statistics.median(a / b for a, b in figures), "ratio", ECHO_GOAL),
    ]


def spread(case: str, seconds: Sequence[float]) -> list[Row]:
    """Return median and 99th percentile in milliseconds."""
    p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99))
    return [Row(f"{case}, p50", float(p50), "ms"), Row(f"{case}, p99", float(p99), "ms")]


def follow(
    trainer: Connection, workers: Sequence[Connection], joined: list[int], shape: Shape, versions: range
) -> list[Row]:
    """Publish versions that all workers wait for, and have all of them join a round for each.

    `joined` counts the rounds of every worker.
    """
    visible: list[float] = []
    promised: list[float] = []
    for number in versions:
        sums = shape.sums[number]
        trainer.ask(PutBlob(digest_of(sums), sums))
        withdraw(trainer, placement_of(0, shape))
        for worker in workers:
            worker.send(Wait(None if number == 0 else (1, number - 1)))
        trainer.ask(Heartbeat())
        began = time.perf_counter()
        trainer.send(Publish(number, digest_of(sums)))
        for worker in workers:
            worker.receive(Available)
            visible.append(time.perf_counter() - began)
        trainer.receive()
        began = time.perf_counter()
        for place, worker in enumerate(workers):
            worker.send(JoinRound(joined[place], None))
        for worker in workers:
            worker.receive(Promise)
            promised.append(time.perf_counter() - began)
        for place, worker in enumerate(workers):
            worker.send(LeaveRound(joined[place], "deadline_exceeded", "that was all"))
            joined[place] += 1
        for worker in workers:
            worker.receive()
    count = len(workers)
    return [
        *spread(f"{count} workers: publish until each knows", visible),
        *spread(f"{count} workers: all join a round until each has its promise", promised),
    ]


def measure(counts: Sequence[int], rounds: int) -> list[Row]:
    """Measure with ever more workers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = shape(VERSIONS * len(counts))
    rows: list[Row] = []
    with hub("--lease-s", "600", "--heartbeat-s", "100", "--grace-s", "600", "--log-level", "error") as (address, pid):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 2 * max(counts) + 64)
        trainer = Connection(context, address)
        join_hub(trainer, 0, model, "trainer")
        workers: list[Connection] = []
        joined = [0] * max(counts)
        for place, count in enumerate(counts):
            before, already = resident_mb(pid), len(workers)
            while len(workers) < count:
                workers.append(Connection(context, address))
                join_hub(workers[-1], len(workers), model, f"rollout-{len(workers)}")
            each = (resident_mb(pid) - before) * 1000 / (count - already)
            rows.append(Row(f"{count} workers: memory of each", each, "kB"))
            rows += rates(address, workers, rounds)
            before = resident_mb(pid)
            rows += follow(trainer, workers, joined, model, range(place * VERSIONS, (place + 1) * VERSIONS))
            rows.append(
                Row(f"{count} workers: memory of each version", (resident_mb(pid) - before) * 1000 / VERSIONS, "kB")
            )
        context.destroy(linger=0)
    return rows


def main() -> None:
    """Measure, print, write."""
    parser: argparse.ArgumentParser = parser_of(NAME, __doc__)
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="how many, in rising order")
    parser.add_argument("--rounds", type=int, default=5, help="how often hub and echo take turns")
    arguments = parser.parse_args()
    report(NAME, arguments, measure([int(part) for part in arguments.workers.split(",")], arguments.rounds))


if __name__ == "__main__":
    main()
