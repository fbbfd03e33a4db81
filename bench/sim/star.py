"""The baselines, on the same links: a star of point-to-point reads (UCX), and a collective broadcast (NCCL).

Both are given the best that can be said for them. A star needs no hub, and its trainer serves all readers at once or
one after the other, whichever is better; a broadcast runs at the rate of the links, in a ring or a tree, whichever is
better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.sim.assumptions import Assumptions
from bench.sim.events import Events
from bench.sim.links import Link, Network
from bench.sim.reads import Read


def star_times(
    assumptions: Assumptions,
    shard_bytes: float,
    readers: int,
    ready_s: Sequence[float] | None = None,
    between: Link | None = None,
    shards: int = 1,
) -> tuple[list[float], list[float]]:
    """Return how long each reader is stalled: all at once from the trainer, and in the order in which they are ready.

    `ready_s` says when each is ready (all at 0 by default), `between` is a link that all of them cross, on which
    `shards` shards of each are on their way at the same time.
    """
    ready = list(ready_s) if ready_s is not None else [0.0] * readers
    return (
        _star(assumptions, shard_bytes, ready, between, shards, readers),
        _star(assumptions, shard_bytes, ready, between, shards, 1),
    )


def _star(
    assumptions: Assumptions, shard_bytes: float, ready: list[float], between: Link | None, shards: int, most: int
) -> list[float]:
    """Let at most so many read at once; return the stalls in the order of `ready`."""
    events, network = Events(), Network()
    events.after = network.settle
    rate = assumptions.link_bytes_per_s
    out = Link("trainer out", rate)
    # All shards of a replica move alike, each from its own shard of the trainer: one of them stands for all.
    wan = () if between is None else (Link(between.name, between.bytes_per_s / shards),)
    ends = [-1.0] * len(ready)
    queue: list[int] = []
    running = [0]

    def turn() -> None:
        while queue and running[0] < most:
            running[0] += 1
            events.later(assumptions.ucx_setup_s.value, begin, queue.pop(0))

    def begin(number: int) -> None:
        read = Read(events, network, shard_bytes, lambda: ended(number))
        read.add("trainer", (out, *wan, Link("reader in", rate)), shard_bytes)
        read.begin()

    def ended(number: int) -> None:
        ends[number] = events.now
        running[0] -= 1
        turn()

    def arrive(number: int) -> None:
        queue.append(number)
        turn()

    for number in sorted(range(len(ready)), key=lambda n: (ready[n], n)):
        events.at(ready[number], arrive, number)
    events.run(lambda: all(end >= 0 for end in ends), math.inf)
    return [end - begun for end, begun in zip(ends, ready, strict=True)]


def better(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the stalls whose sum is less."""
    return list(min(one, other, key=sum))


def broadcast_s(assumptions: Assumptions, total_bytes: float, ranks: int, rate: float | None = None) -> float:
    """Return how long a pipelined broadcast to `ranks` others takes once all are there: a ring or two trees."""
    a = assumptions
    link = a.nic_bytes_per_s.value * a.nccl_share.value if rate is None else rate
    hop_s = a.nccl_chunk_bytes.value / link + a.nccl_hop_s.value
    ring = total_bytes / link + ranks * hop_s
    tree = total_bytes / link + 2 * math.ceil(math.log2(ranks + 1)) * hop_s
    return min(ring, tree)


def setup_s(assumptions: Assumptions, ranks: int) -> float:
    """Return how long a new communicator takes."""
    return assumptions.nccl_setup_s.value + ranks * assumptions.nccl_setup_rank_s.value
