"""The long links of the mini-clusters are as long and as slow as was asked: bounds that hold on any machine."""

from __future__ import annotations

from bench.clusters.cluster import Cluster
from bench.remote import Remote

from tests.processes.topology.site import Site

STREAM_BYTES = 2 << 20


def test_bytes_cross_no_sooner_and_no_faster_than_the_link_lets_them(site: Site) -> None:
    cluster = site.cluster
    wan = cluster.topology.wan
    before = cluster.entered_bytes("a")
    trip_s, stream_s = measured(cluster)
    assert trip_s >= 2 * wan.latency_ms / 1e3
    assert stream_s >= STREAM_BYTES / (wan.rate_mbit * 125_000)
    crossed = cluster.entered_bytes("a") - before
    assert STREAM_BYTES <= crossed < 2 * STREAM_BYTES, "with headers, and what was lost and sent again"


def measured(cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of a round trip between the zones, and of a stream from one to the other."""
    near, far = cluster.hosts["trainer"], cluster.hosts["remote0"]
    with (
        Remote("clusters/probe.py", prefix=near.command) as one,
        Remote("clusters/probe.py", prefix=far.command) as other,
    ):
        there = {"address": near.address, "port": one.do("serve", address=near.address)}
        trip_s = other.do("round_trip", **there, count=3)
        return float(trip_s), float(other.do("stream", **there, total_bytes=STREAM_BYTES))
