"""How true the links are: round trips and the rate of a stream, measured with plain sockets, beside what was asked."""

from __future__ import annotations

import contextlib

from bench.clusters.cluster import Cluster, Topology, Wan
from bench.common import Row
from bench.remote import Remote

NAME = "links"
RATE_MBIT = 200.0
WANS = (Wan(rate_mbit=50, latency_ms=20), Wan(rate_mbit=100, latency_ms=10))
STREAM_S = 3.0
_TRIPS = 20
_MBIT = 125_000.0


def measure(quick: bool) -> list[Row]:
    """Measure a path in one zone, and one over each long link."""
    rows: list[Row] = []
    for wan in WANS[:1] if quick else WANS:
        with Cluster(Topology({"a": ["one", "two"], "b": ["far"]}, RATE_MBIT, wan)) as cluster:
            if not rows:
                rows += _path(cluster, "two", RATE_MBIT, 0.0, "one zone")
            rows += _path(cluster, "far", wan.rate_mbit, 2 * wan.latency_ms, "two zones")
    return rows


def _path(cluster: Cluster, name: str, rate_mbit: float, trip_ms: float, label: str) -> list[Row]:
    with contextlib.ExitStack() as stack:
        ends = {
            host: stack.enter_context(Remote("clusters/probe.py", prefix=cluster.hosts[host].command))
            for host in ("one", name)
        }
        there = {"address": cluster.hosts["one"].address}
        there["port"] = ends["one"].do("serve", **there)
        trip_s = ends[name].do("round_trip", **there, count=_TRIPS)
        total_bytes = int(rate_mbit * _MBIT * STREAM_S)
        rate = total_bytes / ends[name].do("stream", **there, total_bytes=total_bytes) / _MBIT
    text = f"{NAME}: {label}, {rate_mbit:g} Mbit/s and {trip_ms:g} ms there and back asked"
    return [
        Row(f"{text}: round trip", trip_s * 1e3, "ms"),
        Row(f"{text}: rate of a TCP stream", rate, "Mbit/s"),
        Row(f"{text}: error of the rate", 100 * (rate / rate_mbit - 1), "%"),
    ]
