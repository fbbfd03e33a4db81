"""How long N readers of one publisher take, each behind a link of its own, and what the publisher has to send.

    python bench/fanout.py [--transports tcp,nixl] [--rounds N] [--json FILE]      (root: it makes network namespaces)

A publisher, a hub and 16 readers run in network namespaces; every link is limited in both directions. The model is
small, so its segments are too: as many as a few GB have with the default size. A *star* is N raw reads from the
publisher at once, *sequential* is one after the other. Bytes are counted at the publisher's interface.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Row, hub_on, limit, parser_of, report, skipped
from content import digest, make
from netns import Host, Network, sent_and_received_bytes, why_unavailable
from remote import Remote

from tensorhub_core.transport.registry import why_unavailable as why_unloadable

NAME = "fanout"
RATE_MBIT = 200
TOTAL_BYTES = 64 << 20
COUNT = 300
CHUNK_BYTES = 256 << 10
SETTINGS = {"segment_bytes": CHUNK_BYTES, "interface": "eth0", "close_timeout_s": 5.0}
READERS = {"tcp": (1, 2, 4, 8, 16), "nixl": (1, 8)}
BASELINE_READERS = 8
TIME_GOAL, SENT_GOAL, JOIN_GOAL = 1.25, 1.5, 1.1
TIMEOUT_S = 120.0
GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """One fan-out: when all were done, what the publisher sent, who read from whom, what the CPUs did.

    `cpu_s` is that of the publisher and the readers, `busy` the share in which the CPUs did anything, others' work too.
    """

    seconds: float
    sent_bytes: int
    sources: dict[str, list[str]]
    cpu_s: float
    busy: float


class Fleet:
    """A publisher and readers in their namespaces; every run is a model of its own at the hub."""

    def __init__(self, nodes: dict[str, Remote], address: str, transport: str) -> None:
        self.nodes, self.address, self.transport = nodes, address, transport
        self.readers = [name for name in nodes if name != "publisher"]
        self._runs = 0
        self._digest = digest(make(TOTAL_BYTES, COUNT, 1))

    def prepare(self, count: int) -> list[str]:
        """Connect and register everybody, and publish; return the readers' names."""
        self._runs += 1
        names = self.readers[:count]
        common = {"server": self.address, "model": f"run {self._runs}", "transport": self.transport}
        both = ["publisher", *names]
        self._all(both, "connect", [{**common, "replica": name, "host": name, "settings": SETTINGS} for name in both])
        blank = [{"total_bytes": TOTAL_BYTES, "count": COUNT, "seed": 1, "blank": name in names} for name in both]
        self._all(both, "make", blank)
        self._all(both, "register")
        self.nodes["publisher"].do("publish", version=1)
        return names

    def _all(self, names: Sequence[str], command: str, arguments: Sequence[dict[str, Any]] | None = None) -> None:
        given = arguments if arguments is not None else [{} for _ in names]
        for future in [self.nodes[name].begin(command, **each) for name, each in zip(names, given, strict=True)]:
            future.result(TIMEOUT_S)

    def fan_out(self, count: int, late: int = 0) -> tuple[Run, dict[str, Any]]:
        """Let `count` readers replicate at once, and `late` more from half-way on; the latters' figures come apart."""
        names = self.prepare(count + late)
        publisher = self.nodes["publisher"].pid
        sent, busy, cpu_s = sent_and_received_bytes(publisher)[0], busy_and_all(), self._cpu_s(names)
        futures: dict[str, Future[Any]] = {}
        for name in names[:count]:
            futures[name] = self.nodes[name].begin("replicate", timeout_s=TIMEOUT_S)
        before = names[0]
        for name in names[count:]:
            wait_for(self.nodes[before], TOTAL_BYTES // 2 if before == names[0] else 1)
            futures[name] = self.nodes[name].begin("replicate", timeout_s=TIMEOUT_S)
            before = name
        got = {name: future.result(TIMEOUT_S) for name, future in futures.items()}
        sent = sent_and_received_bytes(publisher)[0] - sent
        busy_s, all_s = (after - earlier for after, earlier in zip(busy_and_all(), busy, strict=True))
        cpu_s = self._cpu_s(names) - cpu_s
        for name in names:
            if self.nodes[name].do("digest") != self._digest:
                raise SystemExit(f"{name} holds other bytes than were published")
        self._drain_events()
        first = [got[name] for name in names[:count]]
        seconds = max(each["ended_s"] for each in first) - min(each["began_s"] for each in first)
        sources = {name: list(each["first_s"]) for name, each in got.items()}
        return Run(seconds, sent, sources, cpu_s, busy_s / all_s), {name: got[name] for name in names[count:]}

    def _cpu_s(self, readers: Sequence[str]) -> float:
        return sum(self.nodes[name].do("cpu") for name in ("publisher", *readers))

    def raw(self, count: int, at_once: bool) -> float:
        """Return the seconds that `count` raw reads from the publisher take, at once or one after the other."""
        offer = self.nodes["publisher"].do("raw_serve", transport=self.transport, interface="eth0")
        arguments = {"transport": self.transport, "interface": "eth0", "chunk_bytes": CHUNK_BYTES, **offer}
        nodes = [self.nodes[name] for name in self.readers[:count]]
        if at_once:
            futures = [node.begin("raw_read", **arguments) for node in nodes]
            got = [future.result(TIMEOUT_S) for future in futures]
        else:
            got = [node.do("raw_read", TIMEOUT_S, **arguments) for node in nodes]
        return float(max(each["ended_s"] for each in got) - min(each["began_s"] for each in got))

    def _drain_events(self) -> None:
        for node in self.nodes.values():
            while not node.events.empty():
                node.events.get()


def many(count: int) -> str:
    """Say how many readers."""
    return "1 reader" if count == 1 else f"{count} readers"


def wait_for(node: Remote, least_bytes: int) -> None:
    """Wait until a node's read has verified so many bytes."""
    end = time.monotonic() + TIMEOUT_S
    while node.events.get(timeout=max(0.1, end - time.monotonic()))[0] < least_bytes:
        pass


def busy_and_all() -> tuple[float, float]:
    """Return the seconds that the CPUs were busy and there in all, since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return float(sum(fields) - fields[3] - fields[4]), float(sum(fields))


@contextlib.contextmanager
def fleet(hosts: dict[str, Host], address: str, transport: str, count: int) -> Iterator[Fleet]:
    """Start the processes of a transport."""
    with contextlib.ExitStack() as stack:
        environment = {"UCX_TLS": "tcp"} if transport == "nixl" else {}
        nodes = {
            name: stack.enter_context(Remote("nodes.py", prefix=hosts[name].command, environment=environment))
            for name in ["publisher", *(f"reader{number}" for number in range(count))]
        }
        yield Fleet(nodes, address, transport)


def measure_transport(crew: Fleet, counts: Sequence[int], rounds: int) -> list[Row]:
    """Measure the fan-outs of one transport, all sizes in every round."""
    label = crew.transport
    runs: dict[int, list[Run]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            runs[count].append(crew.fan_out(count)[0])
    one = statistics.median(run.seconds for run in runs[1])
    rows = [Row(f"{label}: 1 reader, time", one, "s")]
    for count in counts:
        seconds = statistics.median(run.seconds for run in runs[count])
        sent = statistics.median(run.sent_bytes for run in runs[count]) / TOTAL_BYTES
        busy = statistics.median(run.busy for run in runs[count])
        cost = statistics.median(run.cpu_s for run in runs[count]) * GIB / (count * TOTAL_BYTES)
        goal = limit if count == 8 else lambda case, value, unit, most: Row(case, value, unit)
        if count > 1:
            rows.append(goal(f"{label}: {count} readers / 1 reader", seconds / one, "x", TIME_GOAL))
        rows.append(goal(f"{label}: {many(count)}, sent by the publisher", sent, "models", SENT_GOAL))
        rows.append(Row(f"{label}: {many(count)}, CPU per GiB read", cost, "s/GiB"))
        rows.append(Row(f"{label}: {many(count)}, CPUs busy with anything", 100 * busy, "%"))
        chains = [f"{name} <- {', '.join(sources)}" for name, sources in runs[count][-1].sources.items()]
        print(f"{label}, {count} readers, last round: {'; '.join(chains)}", file=sys.stderr, flush=True)
    return rows


def measure_baselines(crew: Fleet, one_s: float) -> list[Row]:
    """Measure a star and a sequence of raw reads."""
    count, label = BASELINE_READERS, crew.transport
    star, sequence = crew.raw(count, at_once=True), crew.raw(count, at_once=False)
    return [
        Row(f"{label}: star of {count} raw reads / 1 reader", star / one_s, "x"),
        Row(f"{label}: {count} raw reads in sequence / 1 reader", sequence / one_s, "x"),
    ]


def measure_late(crew: Fleet, rounds: int) -> list[Row]:
    """Measure what a reader that comes when the fan-out is half done waits for, gives to others and costs them."""
    label, count = crew.transport, BASELINE_READERS
    first, served, slower = [], [], []
    for _ in range(rounds):
        calm = crew.fan_out(count)[0]
        run, late = crew.fan_out(count, late=2)
        name, other = late
        joined = late[name]["began_s"]
        first.append(min(late[name]["first_s"].values()) - joined)
        if name in late[other]["first_s"]:
            served.append(late[other]["first_s"][name] - joined)
        slower.append(run.seconds / calm.seconds)
        text = f"{name} <- {', '.join(run.sources[name])}; {other} <- {', '.join(run.sources[other])}"
        print(f"{label}, joined late: {text}", file=sys.stderr, flush=True)
    rows = [
        Row(f"{label}: joins half-way: to its first verified byte", statistics.median(first) * 1e3, "ms"),
        limit(f"{label}: joins half-way: time of the other {count}", statistics.median(slower), "x", JOIN_GOAL),
    ]
    if served:
        case = f"{label}: joins half-way: to the first byte verified at a reader of its own"
        rows.insert(1, Row(case, statistics.median(served) * 1e3, "ms"))
    return rows


def measure(transports: Sequence[str], rounds: int, most_readers: int) -> list[Row]:
    """Measure every transport that loads."""
    loadable = []
    for transport in transports:
        why = why_unloadable(transport)
        if why:
            skipped(NAME, transport, why)
        else:
            loadable.append(transport)
    rows: list[Row] = []
    with Network() as network:
        most = max([BASELINE_READERS + 2, *(max(READERS.get(name, (1, 8))) for name in loadable)])
        names = ["hub", "publisher", *(f"reader{number}" for number in range(most))]
        hosts = {name: network.host(name, RATE_MBIT) for name in names}
        with hub_on(hosts["hub"].command, hosts["hub"].address) as (address, _):
            for number, transport in enumerate(loadable):
                counts = [count for count in READERS.get(transport, (1, 8)) if count <= most_readers]
                with fleet(hosts, address, transport, max(*counts, BASELINE_READERS + 2)) as crew:
                    rows += measure_transport(crew, counts, rounds)
                    if number == 0:
                        rows += measure_late(crew, rounds) + measure_baselines(crew, rows[0].value)
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--transports", default="tcp,nixl", help="names, comma-separated (default tcp,nixl)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every size (default 3)")
    parser.add_argument("--most-readers", type=int, default=16, help="leave out larger fan-outs (default 16)")
    arguments = parser.parse_args()
    why = why_unavailable()
    if why:
        skipped(NAME, "everything", why)
    rows = [] if why else measure(arguments.transports.split(","), arguments.rounds, arguments.most_readers)
    report(NAME, arguments, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
