"""A hub that retains, and what its tests need: workers here and elsewhere, closed with it, and what it says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tensorhub_core import Worker, connect, serve
from tensorhub_core.client.oneshot import ask
from tensorhub_core.state.messages import GetStatus, ModelStatus, StatusReply
from tests.processes.client.actor import Actor
from tests.processes.client.samples import Tensors, blank, make, same

MIB = 8
BYTES = sum(tensor.nbytes for tensor in make("plain", 1, mib=MIB).values())
HUB = {"lease_s": 1.0, "heartbeat_s": 0.1}
QUICK = {"call_timeout_s": 40, "close_timeout_s": 2, "handover_s": 2}


class Site:
    """One hub in this process, which may be restarted at its address."""

    def __init__(self, stack: contextlib.ExitStack, **options: Any) -> None:
        self._stack, self._options = stack, {**HUB, **options}
        self._server = serve(**self._options)
        self.address = self._server.address
        stack.callback(lambda: self._server.close())

    def stop(self) -> None:
        self._server.close()

    def start(self) -> None:
        self._server = serve(self.address, **self._options)

    def worker(self, replica: str, **more: Any) -> Worker:
        """Connect a worker of this process; closed with the site."""
        settings = {**QUICK, **more.pop("settings", {})}
        worker = connect(self.address, model="m", replica=replica, settings=settings, **more)
        self._stack.callback(worker.close)
        return worker

    def trainer(
        self, version: int = 1, replica: str = "trainer", mib: int = MIB, **more: Any
    ) -> tuple[Worker, Tensors]:
        """Connect a worker that publishes the sample of seed `version`."""
        worker, tensors = self.worker(replica, **more), make("plain", version, mib=mib)
        worker.register(tensors)
        worker.publish(version)
        return worker, tensors

    def reader(self, replica: str, mib: int = MIB, **more: Any) -> tuple[Worker, Tensors]:
        """Connect a worker with blank memory."""
        worker, tensors = self.worker(replica, **more), blank(make("plain", 1, mib=mib))
        worker.register(tensors)
        return worker, tensors

    def remote(self, actor: Actor, replica: str, version: int = 0, mib: int = MIB, **more: Any) -> str:
        """Connect a worker of another process; it publishes the sample of seed `version`, unless that is 0."""
        settings = {**QUICK, **more.pop("settings", {})}
        actor.do("connect", replica, server=self.address, model="m", replica=replica, settings=settings, **more)
        actor.do("register", replica, sample="plain", seed=version or 1, mib=mib, blank=not version)
        if version:
            actor.do("call", replica, method="publish", version=version)
        return replica

    def check(self, version: int, mib: int = MIB) -> str:
        """Fetch a version as a newcomer, compare every byte, and return from whom it came."""
        sources: list[str] = []
        settings = {**QUICK}
        with connect(
            self.address, model="m", replica=f"new {time.monotonic_ns()}", spot=True, settings=settings
        ) as new:
            tensors = blank(make("plain", 1, mib=mib))
            new.register(tensors)
            got = new.replicate(version, timeout_s=30, publish=False, progress=lambda done, total, s: sources.append(s))
            assert got == version
        assert same(tensors, make("plain", version, mib=mib))
        return sources[-1]

    def status(self) -> ModelStatus:
        """Return what the hub says of the model."""
        reply = ask(self.address, GetStatus("m"))
        assert isinstance(reply, StatusReply)
        return reply.models[0]

    def retained(self) -> list[int]:
        """Return the versions that are retained now."""
        return [row.version for row in self.status().versions if row.retained]

    def offload_bytes(self) -> int:
        """Return what offload copies take."""
        return self.status().offload.bytes


@contextlib.contextmanager
def site(**options: Any) -> Iterator[Site]:
    """Run a hub for a block."""
    with contextlib.ExitStack() as stack:
        yield Site(stack, **options)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def rewrite(trainer: Worker, tensors: Tensors, version: int, mib: int = MIB) -> None:
    """Step like a trainer: take back, write other bytes in place, publish the next version."""
    trainer.unpublish()
    for name, tensor in make("plain", version, mib=mib).items():
        tensors[name].copy_(tensor)
    trainer.publish(version)
