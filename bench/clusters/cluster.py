"""A small cluster on one machine: zones of hosts behind links with a rate, and long links between the zones.

A host is a network namespace, a zone a switch, and the long links are a `forwarder` process: it has the rate and the
latency that this kernel's traffic control does not offer. Used by the paper's workloads and by the tests of topology.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import TracebackType

from bench.netns import Host, Network
from bench.remote import Remote

_MBIT = 125_000.0
_QUEUE_S = 0.05
"""Beyond what is on its way to the other end and back, a router keeps what its line sends in this time."""


@dataclass(frozen=True)
class Wan:
    """The link between each two zones, in both directions: its rate and how long a packet takes to the other end."""

    rate_mbit: float
    latency_ms: float

    @property
    def queue_bytes(self) -> float:
        """Return how much a router keeps for a line before it drops."""
        return self.rate_mbit * _MBIT * (2 * self.latency_ms / 1e3 + _QUEUE_S)


@dataclass(frozen=True)
class Topology:
    """The hosts of each zone by name, the rate of each host's link in both directions, and what joins the zones."""

    zones: Mapping[str, Sequence[str]]
    rate_mbit: float
    wan: Wan = field(default=Wan(rate_mbit=100, latency_ms=10))


@dataclass(frozen=True)
class Crossed:
    """What has crossed from one zone to another since the cluster began, and what was dropped for want of room."""

    carried_bytes: int
    dropped_bytes: int


class Cluster:
    """The hosts of a topology and what joins them; a context manager. Needs root (`netns.why_unavailable`)."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.hosts: dict[str, Host] = {}
        self._forwarder: Remote | None = None
        self._stack = contextlib.ExitStack()
        try:
            self._network = self._stack.enter_context(Network(tuple(topology.zones)))
            for zone, names in topology.zones.items():
                for name in names:
                    self.hosts[name] = self._network.host(name, topology.rate_mbit, zone)
            if len(topology.zones) > 1:
                self._forwarder = self._join_zones()
        except BaseException:
            self._stack.close()
            raise

    def _join_zones(self) -> Remote:
        forwarder = self._stack.enter_context(Remote("clusters/forwarder.py"))
        device = forwarder.do("open", zones=self._network.switches)
        wan = self.topology.wan
        line = {"rate_bytes_per_s": wan.rate_mbit * _MBIT, "delay_s": wan.latency_ms / 1e3}
        for one, other in combinations(self.topology.zones, 2):
            forwarder.do("link", one=one, other=other, **line, queue_bytes=wan.queue_bytes)
        for zone in self.topology.zones:
            self._network.plug(zone, device)
        forwarder.do("go")
        return forwarder

    def crossed(self) -> dict[tuple[str, str], Crossed]:
        """Return what has crossed so far, by (from, to)."""
        if self._forwarder is None:
            return {}
        return {
            (line["from"], line["to"]): Crossed(line["carried_bytes"], line["dropped_bytes"])
            for line in self._forwarder.do("counters")
        }

    def entered_bytes(self, zone: str) -> int:
        """Return how many bytes have come into a zone from the others."""
        return sum(crossed.carried_bytes for (_, end), crossed in self.crossed().items() if end == zone)

    def close(self) -> None:
        """Remove all of it."""
        self._stack.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
