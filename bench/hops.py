"""How much later each reader of a chain is done than the one that it follows, and what that time is spent on.

    python bench/hops.py [--quick] [--cases NAME,...] [--rounds N] [--json FILE]  (root for cases behind links)

A publisher and four readers, each a process; every reader follows the one before it, so that the publisher sends a
version once. A *lag* is how much later a segment is shown by a reader than by the reader that it follows. It is the
sum of what comes after each other: until the follower *knows* of the segment, has *posted* its read, until that has
*landed*, is *checked*, is *shown*. In bytes it is what a reader shows more than its follower at the same time. Round
1 connects and is left out; what a reader pays for its commit at the hub is in `ended`. Readers of one machine share
its CPUs: at memory speed a chain of four is bound by them.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from common import Row, hub, hub_on, parser_of, report, skipped
from netns import Network, why_unavailable
from numpy.typing import NDArray
from remote import Remote

from tensorhub_core.transport.registry import why_unavailable as why_unloadable

NAME = "hops"
READERS = 4
TIMEOUT_S = 60.0
STEPS = ("knows", "posted", "landed", "checked", "shown")
"""What happens to a segment at a reader, one after the other."""


@dataclass(frozen=True)
class Case:
    """A chain to measure; without `rate_mbit` at memory speed."""

    transport: str
    total_bytes: int
    segment_bytes: int
    rate_mbit: float | None = None

    @property
    def name(self) -> str:
        """Return what it is called in tables."""
        speed = "memory" if self.rate_mbit is None else f"{self.rate_mbit:g}M"
        return f"{self.transport}-{speed}-{self.segment_bytes >> 10}K"


MIB = 1 << 20
CASES = [
    Case("tcp", 64 * MIB, MIB // 4, 200.0),
    Case("tcp", 64 * MIB, 4 * MIB, 200.0),
    Case("tcp", 256 * MIB, MIB // 4, 1000.0),
    Case("tcp", 256 * MIB, 4 * MIB, 1000.0),
    Case("nixl", 64 * MIB, MIB // 4, 200.0),
    Case("nixl", 256 * MIB, 4 * MIB, 1000.0),
    Case("auto", 512 * MIB, 4 * MIB),
    Case("tcp", 512 * MIB, 4 * MIB),
    Case("nixl", 512 * MIB, 4 * MIB),
]
QUICK = ("tcp-200M-256K", "auto-memory-4096K")


@dataclass(frozen=True)
class Read:
    """What one reader did: `times` s [steps, segments], nan for what it did not do, and its begin and end."""

    times: NDArray[np.float64]
    looks: int
    began_s: float
    ended_s: float
    sources: list[str]

    @property
    def shown(self) -> NDArray[np.float64]:
        """Return when each segment was shown."""
        return self.times[-1]


def read_of(notes: Sequence[Any], got: Any, segments: int) -> Read:
    """Take apart the notes of a read."""
    times = np.full((len(STEPS), segments), np.nan)
    looks = 0
    for kind, when, begin, end in notes:
        if kind == "looked":
            looks += 1
            continue
        row = times[("allowed", "posted", "landed", "checked", "shown").index(kind), begin:end]
        # What is counted from the start comes again for segments that it was said of before.
        row[np.isnan(row)] = when
    return Read(times, looks, got["began_s"], got["ended_s"], list(got["first_s"]))


class Chain:
    """A publisher and readers; every round is a version."""

    def __init__(self, case: Case, nodes: dict[str, Remote], address: str) -> None:
        self.case, self.nodes, self.version = case, nodes, 0
        self.readers = [name for name in nodes if name != "publisher"]
        self.segments = -(-case.total_bytes // case.segment_bytes)
        settings: dict[str, Any] = {"segment_bytes": case.segment_bytes, "close_timeout_s": 5.0}
        if case.rate_mbit is not None:
            settings["interface"] = "eth0"
        common = {"server": address, "model": case.name, "transport": case.transport, "settings": settings}
        for name, node in nodes.items():
            host = name if case.rate_mbit is not None else None
            node.do("connect", replica=name, host=host, **common)
            node.do("make", total_bytes=case.total_bytes, count=1, seed=1, blank=True)
            node.do("register")

    def round(self, count: int) -> list[Read]:
        """Publish a version and have some readers take it; return what they did, in the order of the chain."""
        self.version += 1
        publisher, readers = self.nodes["publisher"], self.readers[:count]
        publisher.do("fill", value=self.version)
        publisher.do("publish", version=self.version)
        for name in readers:
            self.nodes[name].do("notes")
        futures = {
            name: self.nodes[name].begin("replicate", version=self.version, timeout_s=TIMEOUT_S, update=True)
            for name in readers
        }
        got = {name: future.result(TIMEOUT_S) for name, future in futures.items()}
        reads = {name: read_of(self.nodes[name].do("notes"), got[name], self.segments) for name in readers}
        for name in readers:
            if not self.nodes[name].do("is_filled", value=self.version):
                raise SystemExit(f"{name} holds other bytes than were published")
        publisher.do("unpublish", timeout_s=TIMEOUT_S)
        return in_order(reads)


def in_order(reads: dict[str, Read]) -> list[Read]:
    """Return the reads of a chain from its first reader on, as far as it is one: others have several followers."""
    chain: list[Read] = []
    before = "publisher"
    while True:
        after = [name for name, read in reads.items() if read.sources[:1] == [before]]
        if len(after) != 1:
            return chain
        chain.append(reads.pop(after[0]))
        before = after[0]


@contextlib.contextmanager
def chain_of(case: Case) -> Iterator[Chain]:
    """Start the processes of a case."""
    names = ["publisher", *(f"reader{number}" for number in range(READERS))]
    with contextlib.ExitStack() as stack:
        if case.rate_mbit is None:
            address, _ = stack.enter_context(hub("--log-level", "warning", "--retain", "0"))
            prefixes: dict[str, Sequence[str]] = dict.fromkeys(names, ())
        else:
            network = stack.enter_context(Network())
            hosts = {name: network.host(name, case.rate_mbit) for name in ["hub", *names]}
            address, _ = stack.enter_context(hub_on(hosts["hub"].command, hosts["hub"].address))
            prefixes = {name: hosts[name].command for name in names}
        tcp = case.transport == "nixl" and case.rate_mbit is not None
        environment = {"UCX_TLS": "tcp"} if tcp else {}
        nodes = {
            name: stack.enter_context(Remote("hops_side.py", prefix=prefixes[name], environment=environment))
            for name in names
        }
        yield Chain(case, nodes, address)


def lags_s(before: Read, after: Read) -> NDArray[np.float64]:
    """Return how much later each segment was shown, s [segments]."""
    return after.shown - before.shown


def lag_bytes(before: Read, after: Read, segment_bytes: int) -> float:
    """Return how much more a reader shows than its follower, on average while both fill."""
    begin, end = after.shown[0], before.shown[-1]
    if begin >= end:
        return float(len(after.shown) * segment_bytes)
    when = np.linspace(begin, end, 500)
    counts = [np.searchsorted(read.shown, when, side="right") for read in (before, after)]
    return float(np.mean(counts[0] - counts[1])) * segment_bytes


def steps_s(before: Read, after: Read) -> NDArray[np.float64]:
    """Return the time of each step, the middle of all segments but the first and the last tenth, s [steps]."""
    knows = np.fmin(after.times[0], after.times[1])
    times = np.vstack([before.shown, knows, after.times[1:]])
    some = slice(times.shape[1] // 10, -max(1, times.shape[1] // 10))
    return np.asarray(np.nanmedian(np.diff(times[:, some], axis=0), axis=1))


def unshown(read: Read, segment_bytes: int) -> NDArray[np.float64]:
    """Return bytes posted but not landed, landed but not checked, checked but not shown, on average, bytes [3]."""
    times = read.times[1:]
    when = np.linspace(times[0, 0], times[-1, -1], 500)
    counts = [np.searchsorted(np.sort(row), when, side="right") for row in times]
    return np.array([np.mean(counts[at] - counts[at + 1]) for at in range(3)]) * segment_bytes


def measure_case(case: Case, rounds: int) -> list[Row]:
    """Measure one case."""
    whole: list[list[Read]] = []
    alone: list[Read] = []
    with chain_of(case) as chain:
        for number in range(rounds + 1):
            one, reads = chain.round(1), chain.round(READERS)
            if number and len(reads) == READERS:
                whole.append(reads)
                alone += one
    if not whole:
        skipped(NAME, case.name, "the readers made no chain")
        return []
    return rows_of(case, alone, whole)


def rows_of(case: Case, alone: Sequence[Read], whole: Sequence[Sequence[Read]]) -> list[Row]:
    """Make rows of the rounds of a case."""
    label, rows = case.name, []
    one = statistics.median(read.ended_s - read.began_s for read in alone)
    rows.append(Row(f"{label}: 1 reader, rate", case.total_bytes / one / 1e6, "MB/s"))
    rows.append(
        Row(f"{label}: 1 reader, began to first shown", 1e3 * _median(r.shown[0] - r.began_s for r in alone), "ms")
    )
    rows.append(
        Row(f"{label}: 1 reader, last shown to end", 1e3 * _median(r.ended_s - r.shown[-1] for r in alone), "ms")
    )
    hops = {"first hop": [(reads[0], reads[1]) for reads in whole]}
    hops["other hops"] = [pair for reads in whole for pair in pairwise(reads[1:])]
    for name, pairs in hops.items():
        rows += [
            Row(f"{label}: {name}, end to end", 1e3 * _median(b.ended_s - a.ended_s for a, b in pairs), "ms"),
            Row(f"{label}: {name}, lag at first", 1e3 * _median(lags_s(a, b)[0] for a, b in pairs), "ms"),
            Row(f"{label}: {name}, lag", 1e3 * _median(float(np.median(lags_s(a, b))) for a, b in pairs), "ms"),
            Row(f"{label}: {name}, lag at last", 1e3 * _median(lags_s(a, b)[-1] for a, b in pairs), "ms"),
            Row(f"{label}: {name}, lag", _median(lag_bytes(a, b, case.segment_bytes) for a, b in pairs) / MIB, "MiB"),
        ]
        steps = np.median([steps_s(a, b) for a, b in pairs], axis=0)
        text = ", ".join(f"{step} {1e3 * value:.2f}" for step, value in zip(STEPS, steps, strict=True))
        print(f"{label}, {name}, ms until it: {text}", file=sys.stderr, flush=True)
    for name, reads in (("first reader", [r[0] for r in whole]), ("followers", [x for r in whole for x in r[1:]])):
        flying, landed, checked = np.median([unshown(read, case.segment_bytes) for read in reads], axis=0) / MIB
        rows.append(Row(f"{label}: {name}, posted and not landed", flying, "MiB"))
        rows.append(Row(f"{label}: {name}, landed and not shown", landed + checked, "MiB"))
    looks = statistics.median(read.looks for reads in whole for read in reads[1:])
    rows.append(Row(f"{label}: followers, looks for each segment", looks / len(whole[0][0].shown), ""))
    return rows


def _median(values: Any) -> float:
    return float(statistics.median(list(values)))


def measure(names: Sequence[str], rounds: int) -> list[Row]:
    """Measure the cases that can be."""
    rows: list[Row] = []
    for case in CASES:
        if names and case.name not in names:
            continue
        why = why_unloadable(case.transport) or ("" if case.rate_mbit is None else why_unavailable())
        if why:
            skipped(NAME, case.name, why)
        else:
            rows += measure_case(case, rounds)
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--cases", default="", help=f"of {', '.join(case.name for case in CASES)} (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every case (default 3)")
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}, one round")
    arguments = parser.parse_args()
    names = list(QUICK) if arguments.quick else [name for name in arguments.cases.split(",") if name]
    report(NAME, arguments, measure(names, 1 if arguments.quick else arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
