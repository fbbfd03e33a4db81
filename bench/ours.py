"""The product's ways among the contenders: a transport alone, and the executor on it as a worker uses it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from contenders import Memory, Way
from rawread import batches, read_all
from shapes import Shape

from tensorhub_core.client import executor as executor_module
from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.reading import Destination, ReadEnd, SourceAccess
from tensorhub_core.client.verifier import Checked, Checker, Landed
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.registry import make_transport

TIMEOUT_S = 120.0


class Transported(Way):
    """A transport without checksums: large runs in chunks of 4 MiB, 256 short ones in a transfer, 8 in flight."""

    transport = "nixl"

    def offer(self) -> Any:
        """Serve the memory."""
        self._transport = make_transport(self.transport)
        self._transport.register([Region(self.memory.ctypes.data, self.memory.nbytes)])
        return {"description": self._transport.describe().hex(), "address": self.memory.ctypes.data}

    def accept(self, offer: Any) -> None:
        """Attach, and prepare the batches."""
        self._transport = make_transport(self.transport)
        self._transport.register([Region(self.memory.ctypes.data, self.memory.nbytes)])
        self._peer = self._transport.attach(bytes.fromhex(offer["description"]))
        here, there = self.memory.ctypes.data, offer["address"]
        runs = zip(self.shape.offsets, self.shape.lengths, strict=True)
        self._batches = self._cut([(here + at, there + at, length) for at, length in runs])

    def run(self) -> None:
        """Read."""
        read_all(self._transport, self._peer, self._batches)

    def close(self) -> None:
        """End both sides of the transport."""
        self._transport.shutdown()

    def _cut(self, runs: list[tuple[int, int, int]]) -> Any:
        return batches(runs)


class OneDescriptor(Transported):
    """The same with one transfer of one descriptor over everything: as fast as the transport can be."""

    def _cut(self, runs: list[tuple[int, int, int]]) -> Any:
        local, remote, _ = runs[0]
        return batches([(local, remote, self.shape.span_bytes)], chunk_bytes=self.shape.span_bytes)


class Trusting(Checker):
    """Take every byte for right without looking."""

    def check(self, landed: Landed) -> Checked:
        """Say that all is right."""
        return Checked(landed, np.ones(landed.end - landed.begin, np.bool_))


class Silent:
    """An observer that does nothing."""

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Hear nothing."""


class Executed(Way):
    """A worker's read: planned, in segments, each verified against its checksum, on the executor's threads."""

    transport = "nixl"
    checker: type[Checker] = Checker

    def __init__(self, shape: Shape, memory: Memory, source_memory: Memory) -> None:
        super().__init__(shape, memory, source_memory)
        self._memory = RegisteredMemory({f"{at:05}": tensor for at, tensor in enumerate(self.tensors)})
        self._executor: ReadExecutor | None = None

    def offer(self) -> Any:
        """Register the tensors and sum them up."""
        self._transport = make_transport(self.transport)
        self._transport.register(self._memory.regions())
        return {
            "description": self._transport.describe().hex(),
            "addresses": self._memory.addresses.tobytes().hex(),
            "sums": self._memory.sums().tobytes().hex(),
        }

    def accept(self, offer: Any) -> None:
        """Describe the source as the server would."""
        self._transport = make_transport(self.transport)
        self._transport.register(self._memory.regions())
        self._executor = ReadExecutor(self._transport)
        sums = np.frombuffer(bytes.fromhex(offer["sums"]), np.uint64)
        addresses = np.frombuffer(bytes.fromhex(offer["addresses"]), np.uint64)
        memory, devices = self._memory, ("cpu",) * len(addresses)
        whole = (memory.layout, memory.table, addresses, devices, sums, len(sums))
        self._source = SourceAccess("lease", "source", bytes.fromhex(offer["description"]), *whole)

    def run(self) -> None:
        """Plan and read."""
        memory = self._memory
        assert self._executor is not None
        plan = plan_read(memory.layout, [self._source.layout], [self._source.sums], memory.table)
        here = Destination(memory.layout, memory.table, memory.addresses, memory.devices, memory.buffers)
        with mock.patch.object(executor_module, "Checker", self.checker):
            job = self._executor.start(plan, [self._source], here, None, Silent())
        outcome = job.wait(TIMEOUT_S)
        if outcome is None or outcome.end is not ReadEnd.VERIFIED:
            raise RuntimeError(f"the read failed: {outcome}")

    def close(self) -> None:
        """End the executor and the transport."""
        if self._executor is not None:
            self._executor.close()
        self._transport.shutdown()


def way_on(kind: type[Transported] | type[Executed], transport: str, checked: bool = True) -> type[Way]:
    """Return a way on a named transport; not `checked`: no byte is verified."""
    fields: dict[str, Any] = {"transport": transport}
    if not checked:
        fields["checker"] = Trusting
    return type(f"{kind.__name__}On{transport.title()}", (kind,), fields)
