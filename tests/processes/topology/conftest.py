"""One cluster with a hub for all tests here; each test has processes and a model of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.clusters.cluster import Cluster, Topology, Wan
from bench.common import hub
from bench.netns import why_unavailable

from tests.processes.topology.site import LEASE_S, NEAR, RATE_MBIT, REMOTE, Site


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Set the cluster up, with a hub in its first zone."""
    why = why_unavailable()
    if why:
        pytest.skip(why)
    zones = {"a": ["hub", "trainer", *NEAR], "b": REMOTE}
    with Cluster(Topology(zones, RATE_MBIT, Wan(rate_mbit=RATE_MBIT / 2, latency_ms=5))) as cluster:
        host = cluster.hosts["hub"]
        options = ("--lease-s", str(LEASE_S), "--heartbeat-s", "0.5", "--retain", "0")
        with hub(*options, prefix=host.command, bind=f"tcp://{host.address}:7077") as (address, _):
            made = Site(cluster, address)
            try:
                yield made
            finally:
                made.close()
