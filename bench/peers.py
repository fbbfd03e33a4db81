"""Compare reads through this product with raw transports and with other libraries, on three shapes, in one run.

    python bench/peers.py [--total-bytes N] [--rounds N] [--cases A,B] [--ways A,B] [--json FILE]

Two processes on one machine. All source processes share one memory and all sink processes another, so every way moves
the same bytes to the same places; its result is compared once per shape. In each round every way runs once, one after
the other, while the processes of the others are stopped. Figures are medians over the rounds; a ratio is the median of
the ratios of each round. CPU seconds are those of both processes, user and system.

`raw TRANSPORT` moves the same shape without checksums, hub or plan; `ours TRANSPORT` is a worker's read: planned, each
segment verified. `nixl` is measured on both of UCX's paths between two processes: `nixl-cma` (one reads the other's
memory, its own choice on one machine) and `nixl-tcp` (what it does between machines without RDMA).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import mooncake_env
from common import Row, at_least, limit, parser_of, report, skipped
from remote import PATHS, Remote, RemoteError
from shapes import CASES, shape_of

from tensorhub_core.transport.registry import why_unavailable

NAME = "peers"
GIB = 1 << 30
OWN_TRANSPORTS = ("tcp", "cma")
TCP_PEERS = ("raw TCP", "ZeroMQ", "gloo", "Mooncake TCP")
RAW_GOAL, READV_GOAL, VERIFY_GOAL, PEER_GOAL = 0.9, 0.9, 1.1, 1.0
SETUP_TIMEOUT_S, RUN_TIMEOUT_S = 120.0, 120.0


@dataclass
class Pair:
    """A source and a sink process with one environment, and the ways they know; `transports` are the product's."""

    name: str
    ways: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    transports: tuple[str, ...] = ()
    source: Remote | None = None
    sink: Remote | None = None

    def start(self, stack: contextlib.ExitStack, files: Sequence[int]) -> None:
        """Start both processes."""
        arguments = [str(file) for file in files]
        self.source, self.sink = (
            stack.enter_context(Remote("peer_side.py", side, *arguments, environment=self.environment, pass_fds=files))
            for side in ("source", "sink")
        )

    def both(self) -> tuple[Remote, Remote]:
        """Return source and sink."""
        assert self.source is not None
        assert self.sink is not None
        return self.source, self.sink

    def signal(self, number: signal.Signals) -> None:
        """Stop or continue both processes."""
        for side in self.both():
            side.signal(number)

    def label(self, way: str) -> str:
        """Return a way's name in the table."""
        return way.replace(" nixl", f" {self.name}")


Figures = dict[str, list[tuple[float, float]]]
"""Seconds and CPU seconds of every round, by label."""


def product_ways(transport: str) -> tuple[str, ...]:
    """Return the ways that a transport of the product is measured by."""
    raw = ("raw nixl, one descriptor",) if transport == "nixl" else ()
    return (*raw, f"raw {transport}", f"ours {transport}", f"ours {transport}, unverified")


def pairs() -> list[Pair]:
    """Return the pairs that can be had here; says which cannot."""
    plain = ["memcpy", "process_vm_readv", "raw TCP", "ZeroMQ", "gloo", "gloo flat"]
    own = []
    for name in OWN_TRANSPORTS:
        why = _why_not(name)
        if why:
            skipped(NAME, f"transport {name}", why)
        else:
            own.append(name)
            plain += product_ways(name)
    made = [Pair("plain", tuple(plain), transports=tuple(own))]
    why = _why_not("nixl")
    if why:
        skipped(NAME, "transport nixl", why)
    else:
        made.append(Pair("nixl-cma", product_ways("nixl"), transports=("nixl",)))
        tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        made.append(Pair("nixl-tcp", product_ways("nixl"), tcp, ("nixl",)))
    if mooncake_env.is_there():
        made.append(Pair("mooncake", ("Mooncake TCP",), mooncake_env.environment(PATHS)))
    else:
        skipped(NAME, "Mooncake TCP", "it is not installed: bench/mooncake_env.py, which `make bench` runs, tries to")
    return made


def _why_not(transport: str) -> str:
    try:
        return why_unavailable(transport)
    except ImportError as error:
        return str(error)


@contextlib.contextmanager
def started(found: Sequence[Pair], total_bytes: int) -> Iterator[None]:
    """Start all pairs around the two memories."""
    size = max(shape_of(case, total_bytes).span_bytes for case in CASES)
    files = [os.memfd_create(f"bench-{side}") for side in ("source", "sink")]
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(os.close, file)
            os.ftruncate(file, size)
        for pair in found:
            pair.start(stack, files)
        found[0].both()[0].do("fill", SETUP_TIMEOUT_S)
        for pair in found:
            if "gloo" in pair.ways:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                joins = [side.begin("join_gloo", port=port) for side in pair.both()]
                for join in joins:
                    join.result(SETUP_TIMEOUT_S)
        yield


def prepare(pair: Pair, case: str, total_bytes: int, wanted: Sequence[str]) -> list[str]:
    """Set the ways of a pair up for a case, and run each once to see that it moves the right bytes."""
    source, sink = pair.both()
    ready = []
    for way in pair.ways:
        if (wanted and way not in wanted) or (case == "one buffer" and way == "gloo flat"):
            continue
        what = {"way": way, "transports": list(pair.transports), "case": case, "total_bytes": total_bytes}
        try:
            offer = source.do("offer", SETUP_TIMEOUT_S, **what)
            sink.do("accept", SETUP_TIMEOUT_S, offer=offer, **what)
            sink.do("blank", RUN_TIMEOUT_S)
            sink.do("run", RUN_TIMEOUT_S, way=way)
        except RemoteError as error:
            skipped(NAME, f"{case}: {pair.label(way)}", str(error))
            continue
        wrong = sink.do("wrong", RUN_TIMEOUT_S)
        if wrong:
            raise SystemExit(f"{case}: {pair.label(way)} left {wrong} tensors wrong")
        ready.append(way)
    return ready


def run_case(found: Sequence[Pair], case: str, total_bytes: int, rounds: int, wanted: Sequence[str]) -> Figures:
    """Measure all ways on one case."""
    figures: Figures = {}
    ready = {pair.name: prepare(pair, case, total_bytes, wanted) for pair in found}
    for pair in found:
        pair.signal(signal.SIGSTOP)
    for number in range(rounds):
        # Every other round backwards, so that no way always follows the same one.
        for pair in found if number % 2 == 0 else found[::-1]:
            pair.signal(signal.SIGCONT)
            source, sink = pair.both()
            for way in ready[pair.name]:
                cpu = source.do("cpu")
                seconds, sink_cpu = sink.do("run", RUN_TIMEOUT_S, way=way)
                cpu = source.do("cpu") - cpu + sink_cpu
                figures.setdefault(pair.label(way), []).append((seconds, cpu))
            pair.signal(signal.SIGSTOP)
    for pair in found:
        pair.signal(signal.SIGCONT)
        for way in ready[pair.name]:
            for side in reversed(pair.both()):
                with contextlib.suppress(RemoteError):
                    side.do("close", way=way)
    return figures


def ratio(figures: Figures, label: str, other: str) -> float:
    """Return the median over the rounds of how fast `label` is in terms of `other`."""
    return statistics.median(b[0] / a[0] for a, b in zip(figures[label], figures[other], strict=True))


def rows_of(case: str, size: int, figures: Figures) -> list[Row]:
    """Return the rates, costs and ratios of one case."""
    rows = []
    for label, rounds in figures.items():
        seconds, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        rows.append(Row(f"{case}: {label}", size / seconds / 1e9, "GB/s"))
        rows.append(Row(f"{case}: {label}, CPU of both", cpu * GIB / size, "s/GiB"))
    return rows + goals_of(case, figures)


def goals_of(case: str, figures: Figures) -> list[Row]:
    """Return the ratios that are held to a goal."""
    rows = []
    ours = [label for label in figures if label.startswith("ours") and not label.endswith("unverified")]
    for label in ours:
        name = label.removeprefix("ours ")
        if f"raw {name}" in figures:
            text = f"{case}: ours / raw, {name}"
            value = ratio(figures, label, f"raw {name}")
            rows.append(at_least(text, value, "ratio", RAW_GOAL) if "nixl" in name else Row(text, value, "ratio"))
        unverified = f"{label}, unverified"
        if unverified in figures:
            rows.append(
                limit(
                    f"{case}: verified / unverified time, {name}", ratio(figures, unverified, label), "x", VERIFY_GOAL
                )
            )
    memory = [label for label in ours if label.endswith("cma")]
    if "process_vm_readv" in figures:
        for label in memory:
            text, value = f"{case}: {label} / process_vm_readv", ratio(figures, label, "process_vm_readv")
            rows.append(
                at_least(text, value, "ratio", READV_GOAL) if case == "small tensors" else Row(text, value, "ratio")
            )
    peers = [label for label in TCP_PEERS if label in figures]
    over_tcp = [label for label in ours if label.endswith("tcp")]
    if peers and over_tcp:
        best = min(peers, key=lambda label: statistics.median(run[0] for run in figures[label]))
        mine = min(over_tcp, key=lambda label: statistics.median(run[0] for run in figures[label]))
        rows.append(
            at_least(f"{case}: {mine} / {best}, the best TCP peer", ratio(figures, mine, best), "ratio", PEER_GOAL)
        )
    return rows


def measure(total_bytes: int, rounds: int, cases: Sequence[str], wanted: Sequence[str]) -> list[Row]:
    """Measure all cases."""
    found = [pair for pair in pairs() if not wanted or set(pair.ways) & set(wanted)]
    rows: list[Row] = []
    with started(found, total_bytes):
        for case in cases:
            figures = run_case(found, case, total_bytes, rounds, wanted)
            rows += rows_of(case, shape_of(case, total_bytes).total_bytes, figures)
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--total-bytes", type=int, default=GIB, help="bytes of every shape, about (default 1 GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways per shape (default 5)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--ways", default="", help="only these, such as 'raw TCP,ours tcp'")
    arguments = parser.parse_args()
    wanted = [way for way in re.split(r",(?! )", arguments.ways) if way]  # a way's own comma has a blank behind it
    rows = measure(arguments.total_bytes, arguments.rounds, arguments.cases.split(","), wanted)
    report(NAME, arguments, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
