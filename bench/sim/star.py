"""The baselines, on the same links: a star of point-to-point reads (UCX), and a collective broadcast (NCCL).

Both are given the best that can be said for them. A star needs no hub, and its trainer serves all readers at once or
one after the other, whichever is better; a broadcast runs at the rate of the links, in a ring or a tree, whichever is
better.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from bench.sim.assumptions import Assumptions
from bench.sim.links import Link


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
    # All shards of a replica move alike, each from its own shard of the trainer: one of them stands for all.
    wan = math.inf if between is None else between.bytes_per_s / shards
    how = (shard_bytes, min(assumptions.link_bytes_per_s, wan), ready, assumptions.ucx_setup_s.value)
    at_once, in_order = _at_once(*how), _in_order(*how)
    return (
        [end - begun for end, begun in zip(at_once, ready, strict=True)],
        [end - begun for end, begun in zip(in_order, ready, strict=True)],
    )


def _at_once(shard_bytes: float, rate: float, ready: Sequence[float], setup_s: float) -> list[float]:
    """Let all who are ready share the rate; return when each ends. Whoever began first ends first: all get the same."""
    ends, now_s, served = [0.0] * len(ready), 0.0, 0.0
    running: deque[tuple[float, int]] = deque()
    coming = deque(sorted((begun_s + setup_s, number) for number, begun_s in enumerate(ready)))
    while running or coming:
        if running:
            ends_s = now_s + (running[0][0] - served) * len(running) / rate
            if not coming or ends_s <= coming[0][0]:
                now_s, served = ends_s, running[0][0]
                ends[running.popleft()[1]] = now_s
                continue
            served += (coming[0][0] - now_s) * rate / len(running)
        now_s, number = coming.popleft()
        running.append((served + shard_bytes, number))
    return ends


def _in_order(shard_bytes: float, rate: float, ready: Sequence[float], setup_s: float) -> list[float]:
    """Serve one after the other, in the order in which they are ready; return when each ends."""
    ends, free_s = [0.0] * len(ready), 0.0
    for number in sorted(range(len(ready)), key=lambda n: (ready[n], n)):
        free_s = ends[number] = max(free_s, ready[number]) + setup_s + shard_bytes / rate
    return ends


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
