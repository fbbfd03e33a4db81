"""What NIXL's prepared descriptor lists would save: made anew, chosen from prepared lists, or posted again as they are.

    python bench/nixl_descriptors.py [--tensors N] [--bytes N] [--regions N] [--rounds N] [--json FILE]

Two agents of one process, set up as the transport sets them up, move N small tensors in batches of 1,024 and 256
descriptors, 8 batches in flight. In each round every way runs once, in another order. *made anew* is what the product
does (createXferReq); *prepared* makes both lists once and chooses from them by index (prepXferDlist, makeXferReq);
*posted again* keeps every request. Ratios are medians over the rounds. The paths that UCX takes can be chosen:
`UCX_TLS=tcp UCX_NET_DEVICES=lo` for TCP, nothing for one process reading the other's memory.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import Row, parser_of, report
from numpy.typing import NDArray

from tensorhub_core.transport.base import Batch, Region
from tensorhub_core.transport.nixl_agent import NixlAgent, load_bindings

NAME = "nixl_descriptors"
GAP_BYTES = 64
"""Between tensors, so that no two of them are one descriptor."""
WINDOW = 8
BATCHES = (1024, 256)


class Pair:
    """A serving and a reading agent over two memories of equal tensors."""

    def __init__(self, tensors: int, length_bytes: int, regions: int) -> None:
        self.bindings = load_bindings()
        room = length_bytes + GAP_BYTES
        self._memories = np.ones(tensors * room, np.uint8), np.zeros(tensors * room, np.uint8)
        self._source, self.reader = (
            NixlAgent(self.bindings, f"{NAME}-{os.getpid()}-{role}", progress_thread=role == "serve", interface=None)
            for role in ("serve", "read")
        )
        for agent, memory in zip((self._source, self.reader), self._memories, strict=True):
            begins = [tensors * number // regions * room for number in range(regions + 1)]
            ends = [end - GAP_BYTES for end in begins[1:]]
            agent.register([Region(memory.ctypes.data + a, b - a) for a, b in zip(begins, ends, strict=False)])
        self.peer = self.reader.add_peer(self._source.metadata())
        at = np.arange(tensors, dtype=np.uint64) * np.uint64(room)
        remote, local = (at + np.uint64(memory.ctypes.data) for memory in self._memories)
        self.all = Batch(local, remote, np.full(tensors, length_bytes, np.uint64))

    def batch(self, begin: int, end: int) -> Batch:
        """Return some of the tensors."""
        return Batch(self.all.local[begin:end], self.all.remote[begin:end], self.all.length_bytes[begin:end])

    def whole(self) -> bool:
        """Tell whether everything has arrived, and blank it."""
        lengths, base = self.all.length_bytes, self._memories[1].ctypes.data
        begins = (self.all.local - np.uint64(base)).astype(np.int64)
        arrived = all(self._memories[1][a : a + n].all() for a, n in zip(begins, lengths.astype(np.int64), strict=True))
        self._memories[1][:] = 0
        return arrived


Make = Callable[[int, int], int]


def ways(pair: Pair) -> tuple[dict[str, tuple[Make, bool]], float]:
    """Return how a request of tensors `begin..end` is had and whether it is released; the seconds of preparing all."""
    raw, backends, bindings = pair.reader._raw, [pair.reader._backend], pair.bindings

    def rows(addresses: NDArray[np.uint64]) -> Any:
        table = np.stack([addresses, pair.all.length_bytes, np.zeros(len(addresses), np.uint64)], axis=1)
        return bindings.nixlXferDList(bindings.DRAM_SEG, np.ascontiguousarray(table))

    began = time.perf_counter()
    local = raw.prepXferDlist(bindings.NIXL_INIT_AGENT, rows(pair.all.local), backends)
    remote = raw.prepXferDlist(pair.peer, rows(pair.all.remote), backends)
    prepared_s = time.perf_counter() - began
    kept: dict[int, int] = {}

    def anew(begin: int, end: int) -> int:
        return pair.reader.start_read(pair.peer, pair.batch(begin, end))

    def prepared(begin: int, end: int) -> int:
        chosen = np.arange(begin, end, dtype=np.int32)
        return int(raw.makeXferReq(bindings.NIXL_READ, local, chosen, remote, chosen, "", backends))

    def again(begin: int, end: int) -> int:
        if begin not in kept:
            kept[begin] = anew(begin, end)
        return kept[begin]

    return {"made anew": (anew, True), "prepared": (prepared, True), "posted again": (again, False)}, prepared_s


def move(pair: Pair, make: Make, release: bool, most: int) -> tuple[float, float]:
    """Move everything; returns the seconds of all of it, and of having the requests."""
    count = len(pair.all.local)
    begins, flights, making_s = iter(range(0, count, most)), list[int](), 0.0
    began = time.perf_counter()
    while True:
        while len(flights) < WINDOW and (begin := next(begins, None)) is not None:
            before = time.perf_counter()
            handle = make(begin, min(begin + most, count))
            making_s += time.perf_counter() - before
            pair.reader.post(handle)
            flights.append(handle)
        if not flights:
            return time.perf_counter() - began, making_s
        for handle in [handle for handle in flights if pair.reader.done(handle)]:
            flights.remove(handle)
            if release:
                pair.reader.release(handle)


def measure(tensors: int, length_bytes: int, regions: int, rounds: int) -> list[Row]:
    """Measure all ways."""
    pair = Pair(tensors, length_bytes, regions)
    rows = []
    for most in BATCHES:
        found, prepared_s = ways(pair)
        figures: dict[str, list[tuple[float, float]]] = {way: [] for way in found}
        for way, (make, release) in found.items():  # also to warm up
            move(pair, make, release, most)
            if not pair.whole():
                raise SystemExit(f"{way} left tensors unread")
        for number in range(rounds):
            order = list(found)
            for way in order[number % len(order) :] + order[: number % len(order)]:
                figures[way].append(move(pair, *found[way], most))
        text = f"{tensors:,} of {length_bytes:,} bytes, {most} a batch"
        rows.append(Row(f"{text}: preparing both lists, once", prepared_s * 1e3, "ms"))
        for way, runs in figures.items():
            all_s, making_s = (statistics.median(column) for column in zip(*runs, strict=True))
            share = statistics.median(a[0] / b[0] for a, b in zip(runs, figures["made anew"], strict=True))
            rows.append(Row(f"{text}: {way}", all_s * 1e3, "ms"))
            rows.append(Row(f"{text}: {way}, of it having the requests", making_s * 1e3, "ms"))
            if way != "made anew":
                rows.append(Row(f"{text}: {way} / made anew", share, "ratio"))
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--tensors", type=int, default=20_480, help="how many (default 20,480)")
    parser.add_argument("--bytes", type=int, default=4096, help="bytes of each (default 4,096)")
    parser.add_argument("--regions", type=int, help="registered regions of a side (default: one for each tensor)")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of all ways (default 21)")
    arguments = parser.parse_args()
    regions = min(arguments.regions or arguments.tensors, arguments.tensors)
    rows = measure(arguments.tensors, arguments.bytes, regions, arguments.rounds)
    report(NAME, arguments, rows)


if __name__ == "__main__":
    main()
