"""Workers inside this process: a real server, the memory transport, and an executor the test controls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorhub_core.client.identity import Identity
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.session import Session
from tensorhub_core.client.worker import Worker
from tensorhub_core.config import ClientConfig
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.server.serving import Server, serve
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tests.unit.client.fake_executor import FakeExecutor


@dataclass
class Hub:
    """One server and the workers that a test connects to it."""

    server: Server
    stack: contextlib.ExitStack
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    lives: int = 0

    def connect(self, replica: str = "trainer", *, executor: FakeExecutor | None = None, **more: Any) -> Worker:
        """Connect a worker; it is closed with the hub."""
        self.lives += 1
        fields = {name: more.pop(name) for name in ("shard", "num_shards", "stream", "spot", "model") if name in more}
        identity = Identity(f"token {self.lives}", fields.pop("model", "policy"), replica, **fields)
        config = ClientConfig(**{"call_timeout_s": 20.0, "close_timeout_s": 3.0, "segment_bytes": 4096, **more})
        mailbox = Mailbox(WorkerCounters())
        session = Session(self.server.address, identity, mailbox)
        mailbox.welcomed(session.open(10.0))
        reader = FakeExecutor() if executor is None else executor
        resources = Resources(session, lambda: MemoryTransport(self.network), lambda _: reader)
        return self.stack.enter_context(Worker(identity, config, resources, mailbox))


@contextlib.contextmanager
def hub(**more: Any) -> Iterator[Hub]:
    """Run a server for the block."""
    with serve(**{"lease_s": 1.0, "heartbeat_s": 0.1, **more}) as server, contextlib.ExitStack() as stack:
        yield Hub(server, stack)
