"""What it costs a reader when the holder that it reads from is gone at 50 %, and another one is there.

    python bench/failover.py [--transports tcp,nixl] [--rounds N] [--json FILE]    (root: it makes network namespaces)

Two holders and a reader in network namespaces behind limited links. The one that is read from is killed, which the
reader's kernel hears at once, or stopped, which only the watchdog finds out after `stall_s`; that time is taken off.
Fetched bytes are counted by the worker (verified ones) and at the reader's interface (all that came).
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common import Row, hub_on, limit, parser_of, report, skipped
from content import digest, make
from netns import Host, Network, sent_and_received_bytes, why_unavailable
from remote import Remote

from tensorhub_core.transport.registry import why_unavailable as why_unloadable

NAME = "failover"
RATE_MBIT = 200
TOTAL_BYTES = 64 << 20
COUNT = 300
STALL_S = 1.0
SETTINGS = {"segment_bytes": 256 << 10, "interface": "eth0", "close_timeout_s": 1.0, "stall_s": STALL_S}
HOLDERS = ("one", "two")
TIME_GOAL, BYTES_GOAL = 1.3, 1.1
TIMEOUT_S = 60.0
WAYS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@dataclass(frozen=True)
class Read:
    """One read: how long, what was fetched in models (verified ones, all that came), when it was disturbed."""

    seconds: float
    verified: float
    received: float
    disturbed_at: float


class Lab:
    """The hosts and the hub; every read has processes and a model of its own."""

    def __init__(self, hosts: dict[str, Host], address: str, transport: str) -> None:
        self.hosts, self.address, self.transport = hosts, address, transport
        self._reads = 0
        self._digest = digest(make(TOTAL_BYTES, COUNT, 1))

    @contextlib.contextmanager
    def _nodes(self) -> Iterator[dict[str, Remote]]:
        self._reads += 1
        environment = {"UCX_TLS": "tcp"} if self.transport == "nixl" else {}
        with contextlib.ExitStack() as stack:
            nodes = {
                name: stack.enter_context(Remote("nodes.py", prefix=self.hosts[name].command, environment=environment))
                for name in (*HOLDERS, "reader")
            }
            common = {"server": self.address, "model": f"read {self._reads}", "transport": self.transport}
            for name, node in nodes.items():
                node.do("connect", **common, replica=name, host=name, settings=SETTINGS)
                node.do("make", total_bytes=TOTAL_BYTES, count=COUNT, seed=1, blank=name == "reader")
                node.do("register")
                if name != "reader":
                    node.do("publish", version=1)
            yield nodes

    def read(self, how: signal.Signals | None) -> Read:
        """Read once; at half of it do `how` to the holder that is read from."""
        with self._nodes() as nodes:
            reader = nodes["reader"]
            received = sent_and_received_bytes(reader.pid)[1]
            reading = reader.begin("replicate", timeout_s=TIMEOUT_S)
            at = 0.0
            if how is not None:
                at, source = half(reader)
                nodes[source].signal(how)
            got: dict[str, Any] = reading.result(TIMEOUT_S)
            received = sent_and_received_bytes(reader.pid)[1] - received
            if reader.do("digest") != self._digest:
                raise SystemExit("the reader holds other bytes than were published")
            verified = reader.do("counters")["bytes_read"]
            if how is not None:
                nodes[source].kill()
            return Read(got["ended_s"] - got["began_s"], verified / TOTAL_BYTES, received / TOTAL_BYTES, at)


def half(reader: Remote) -> tuple[float, str]:
    """Wait until half is verified; return how much was, and who is read from."""
    end = time.monotonic() + TIMEOUT_S
    while True:
        done_bytes, total_bytes, source = reader.events.get(timeout=max(0.1, end - time.monotonic()))
        if 2 * done_bytes >= total_bytes:
            return done_bytes / total_bytes, source


def measure_transport(lab: Lab, rounds: int) -> list[Row]:
    """Measure undisturbed and disturbed reads in turn."""
    reads: dict[str, list[Read]] = {"undisturbed": [], **{way: [] for way in WAYS}}
    for _ in range(rounds):
        for way, found in reads.items():
            found.append(lab.read(WAYS.get(way)))
    calm = statistics.median(read.seconds for read in reads["undisturbed"])
    rows = [
        Row(f"{lab.transport}: undisturbed", calm, "s"),
        Row(f"{lab.transport}: undisturbed, received", reads["undisturbed"][0].received, "models"),
    ]
    for way in WAYS:
        label = f"{lab.transport}: source {way}"
        watchdog_s = STALL_S if way == "stopped" else 0.0
        seconds = statistics.median(read.seconds for read in reads[way])
        at = statistics.median(read.disturbed_at for read in reads[way])
        verified = statistics.median(read.verified for read in reads[way])
        received = statistics.median(read.received for read in reads[way])
        less = f", less {STALL_S:g} s of the watchdog" if watchdog_s else ""
        rows += [
            Row(f"{label}, at", 100 * at, "%"),
            limit(f"{label}: time / undisturbed{less}", (seconds - watchdog_s) / calm, "x", TIME_GOAL),
            limit(f"{label}: fetched and verified", verified, "models", BYTES_GOAL),
            limit(f"{label}: received at the interface", received, "models", BYTES_GOAL),
        ]
    return rows


def measure(transports: Sequence[str], rounds: int) -> list[Row]:
    """Measure every transport that loads."""
    rows: list[Row] = []
    with Network() as network:
        hosts = {name: network.host(name, RATE_MBIT) for name in ("hub", "reader", *HOLDERS)}
        with hub_on(hosts["hub"].command, hosts["hub"].address) as (address, _):
            for transport in transports:
                why = why_unloadable(transport)
                if why:
                    skipped(NAME, transport, why)
                else:
                    rows += measure_transport(Lab(hosts, address, transport), rounds)
    return rows


def main() -> int:
    """Measure, print, write."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--transports", default="tcp,nixl", help="names, comma-separated (default tcp,nixl)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every kind (default 3)")
    arguments = parser.parse_args()
    why = why_unavailable()
    if why:
        skipped(NAME, "everything", why)
    report(NAME, arguments, [] if why else measure(arguments.transports.split(","), arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
