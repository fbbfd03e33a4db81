"""Machines behind links of their own: a hub, two holders and a reader, each in a network namespace."""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bench.content import digest, make
from bench.netns import Host
from bench.remote import Remote

LEASE_S = 1.5
TOTAL_BYTES = 24 << 20
COUNT = 40
RATE_MBIT = 100
"""A read takes about 2 s, so that half of it is well before its end, also for who hears of it late."""
SETTINGS = {"segment_bytes": 256 << 10, "window": 4, "stall_s": 1.0, "close_timeout_s": 1.0, "call_timeout_s": 60.0}


class Site:
    """A hub and the hosts that reach it."""

    def __init__(self, hosts: dict[str, Host], address: str) -> None:
        self.hosts, self.address = hosts, address


class Links:
    """One test's processes, and the links between them."""

    def __init__(self, site: Site, transport: str) -> None:
        self.site, self.transport = site, transport
        self.model = f"model {secrets.token_hex(4)}"
        self.count = COUNT
        self._nodes = contextlib.ExitStack()
        self._cut: set[str] = set()

    def node(self, name: str, **settings: object) -> Remote:
        """Start a process on a host and connect its worker."""
        # Or UCX would read the other process's memory: it is on the same machine, whatever its network.
        over_links = {"UCX_TLS": "tcp"} if self.transport == "nixl" else {}
        node = Remote("nodes.py", prefix=self.site.hosts[name].command, environment=over_links)
        self._nodes.enter_context(node)
        connect = {"server": self.site.address, "model": self.model, "replica": name, "transport": self.transport}
        node.do("connect", **connect, settings={**SETTINGS, "interface": "eth0", **settings})
        return node

    def holder(self, name: str, seed: int = 1) -> Remote:
        """Start a process that publishes version 1."""
        node = self.node(name)
        node.do("make", total_bytes=TOTAL_BYTES, count=COUNT, seed=seed)
        node.do("register")
        node.do("publish", version=1)
        return node

    def reader(self) -> Remote:
        """Start a process whose memory waits to be filled: every byte is the sentinel."""
        node = self.node("reader")
        node.do("make", total_bytes=TOTAL_BYTES, count=COUNT, seed=1, blank=True)
        node.do("register")
        return node

    def started(self, *holders: str) -> tuple[list[Remote], Remote]:
        """Start holders and a reader at the same time."""
        with ThreadPoolExecutor(len(holders) + 1) as pool:
            reader = pool.submit(self.reader)
            return list(pool.map(self.holder, holders)), reader.result()

    def cut(self, name: str) -> None:
        """Cut the link of a host."""
        self._cut.add(name)
        self.site.hosts[name].cut()

    def mend(self, name: str) -> None:
        """Undo it."""
        self.site.hosts[name].mend()
        self._cut.discard(name)

    def close(self) -> None:
        """Mend what is cut, and end the processes."""
        for name in list(self._cut):
            self.mend(name)
        self._nodes.close()


def half_read(reader: Remote, reading: Future[Any], timeout_s: float = 30.0) -> str:
    """Wait until a read is half done; return who is read from. Raises what the read raised."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if reading.done():
            raise AssertionError(f"the read was over before it could be disturbed: {reading.result()}")
        with contextlib.suppress(queue.Empty):
            done_bytes, total_bytes, source = reader.events.get(timeout=0.2)
            if 2 * done_bytes >= total_bytes:
                return str(source)
    raise AssertionError(f"half of it had not come within {timeout_s:g} s")


def right_digest(seed: int = 1) -> str:
    """Return the digest of what a holder with this seed publishes, made here."""
    return digest(make(TOTAL_BYTES, COUNT, seed))
