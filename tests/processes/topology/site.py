"""Two zones and the link between them: a hub and a trainer in one, readers in both, each in a network namespace."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from bench.clusters.cluster import Cluster
from bench.content import digest, make
from bench.netns import sent_and_received_bytes
from bench.remote import Remote

LEASE_S = 3.0
RATE_MBIT = 200.0
TOTAL_BYTES = 16 << 20
"""Readers of less than 16 MiB do not wait for each other (decision 0007)."""
COUNT = 40
NEAR = [f"near{number}" for number in range(16)]
REMOTE = [f"remote{number}" for number in range(3)]
SETTINGS = {"segment_bytes": 64 << 10, "window": 4, "interface": "eth0", "close_timeout_s": 1.0}
TIMEOUT_S = 60.0


class Site:
    """The cluster, where its hub is, and the processes on its hosts, which live on from test to test."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        self.cluster, self.address = cluster, address
        self.nodes: dict[str, Remote] = {}

    def node(self, name: str) -> Remote:
        """Return the process of a host, started if there is none."""
        if name not in self.nodes:
            self.nodes[name] = Remote("nodes.py", prefix=self.cluster.hosts[name].command)
        return self.nodes[name]

    def kill(self, name: str) -> None:
        """Kill the process of a host."""
        self.nodes.pop(name).kill()

    def close(self) -> None:
        """End the processes, all at once."""
        for node in self.nodes.values():
            node.kill()
        for node in self.nodes.values():
            node.close()


class Fleet:
    """A trainer that has published version 1 of a model of this test, and readers."""

    def __init__(self, site: Site, readers: Sequence[str]) -> None:
        """Connect everybody; the readers' memory waits to be filled: every byte is the sentinel."""
        self.cluster = site.cluster
        self.nodes = {name: site.node(name) for name in ("trainer", *readers)}
        self.right = digest(make(TOTAL_BYTES, COUNT, 1))
        model = f"model {secrets.token_hex(4)}"
        common = {"server": site.address, "model": model, "transport": "tcp", "settings": SETTINGS}
        where = {name: {"replica": name, "host": name, "zone": site.cluster.hosts[name].zone} for name in self.nodes}
        self._all("connect", {name: {**common, **where[name]} for name in self.nodes})
        size = {"total_bytes": TOTAL_BYTES, "count": COUNT, "seed": 1}
        self._all("make", {name: {**size, "blank": name != "trainer"} for name in self.nodes})
        self._all("register", {name: {} for name in self.nodes})
        self.nodes["trainer"].do("publish", version=1)

    def _all(self, command: str, arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        futures = {name: self.nodes[name].begin(command, **given) for name, given in arguments.items()}
        return {name: future.result(TIMEOUT_S) for name, future in futures.items()}

    def read(self, readers: Sequence[str]) -> dict[str, Future[Any]]:
        """Let readers replicate at once."""
        return {name: self.nodes[name].begin("replicate", timeout_s=TIMEOUT_S) for name in readers}

    def check(self, reading: Mapping[str, Future[Any]]) -> None:
        """Wait until readers have version 1, right to the byte."""
        for name, future in reading.items():
            assert future.result(TIMEOUT_S)["version"] == 1, name
        for name, found in self._all("digest", {name: {} for name in reading}).items():
            assert found == self.right, f"{name} holds other bytes than were published"

    def crossed_models(self) -> float:
        """Return how many models have come into the readers' zone since the cluster began."""
        return self.cluster.entered_bytes("b") / TOTAL_BYTES

    def sent_models(self) -> float:
        """Return how many models have left the trainer's host since it began."""
        return sent_and_received_bytes(self.nodes["trainer"].pid)[0] / TOTAL_BYTES
