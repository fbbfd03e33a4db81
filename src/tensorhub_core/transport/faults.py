"""Break a transport on purpose, by a seeded plan: what tests and drills put between the executor and the real one."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tensorhub_core.clock import Clock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Region, Transport


class FaultKind(Enum):
    """What happens to a read."""

    DELAY = "delay"
    """It is reported done `delay_s` late."""
    SLOW = "slow"
    """It is reported done no faster than `bytes_per_s`."""
    STALL = "stall"
    """It never ends and moves nothing."""
    FAIL = "fail"
    """It fails."""
    FLIP = "flip"
    """One bit of it arrives wrong."""
    LIE = "lie"
    """It is reported done, and nothing has moved."""
    LATE = "late"
    """It does not end; once it is closed its bytes land with a later call, unless a fence comes first."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; the figures count only for the kinds that have them."""

    kind: FaultKind
    delay_s: float = 0.0
    bytes_per_s: float = 1e6


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Say which reads and attaches go wrong, counted from 0 over the life of the transport.

    `reads` names single reads; any other meets each fault of `chances` with that probability, drawn from `seed`.
    """

    reads: Mapping[int, Fault] = field(default_factory=dict)
    chances: Mapping[Fault, float] = field(default_factory=dict)
    unreachable: frozenset[int] = frozenset()
    seed: int = 0

    def fault_of(self, number: int) -> Fault | None:
        """Return what happens to the read of this number."""
        if number in self.reads:
            return self.reads[number]
        chance = random.Random(f"{self.seed}/{number}")
        return next((fault for fault, share in self.chances.items() if chance.random() < share), None)


@dataclass(slots=True)
class _Faulty:
    """A read: `inner` is the real one, if it was posted."""

    number: int
    peer: PeerId
    batch: Batch
    fault: Fault | None
    posted_s: float
    inner: ReadId | None
    flipped: bool = False


class FaultyTransport:
    """Pass calls on to another transport and break some reads; see `Transport`. Flipping needs CPU memory."""

    def __init__(self, inner: Transport, plan: FaultPlan, clock: Clock) -> None:
        """Wrap a transport."""
        self.name, self.fills_devices = inner.name, inner.fills_devices
        self._inner = inner
        self._plan = plan
        self._clock = clock
        self._posted = 0
        self._attached = 0
        self._reads: dict[ReadId, _Faulty] = {}
        self._late: list[_Faulty] = []
        self._poisoned = False

    def register(self, regions: Sequence[Region]) -> None:
        """Pass on."""
        self._inner.register(regions)

    def register_local(self, regions: Sequence[Region]) -> None:
        """Pass on."""
        self._inner.register_local(regions)

    def deregister(self) -> None:
        """Pass on."""
        self._inner.deregister()

    def describe(self) -> bytes:
        """Pass on."""
        return self._inner.describe()

    def attach(self, description: bytes) -> PeerId:
        """Pass on, or fail as the plan says."""
        self._attached += 1
        if self._attached - 1 in self._plan.unreachable:
            raise TransportError("the peer cannot be reached (on purpose)")
        return self._inner.attach(description)

    def detach(self, peer: PeerId) -> None:
        """Pass on."""
        self._inner.detach(peer)

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        """Post the read unless its fault keeps it from moving."""
        if self._poisoned:
            raise TransportError("a read was closed before it had ended: fence() first")
        number, self._posted = self._posted, self._posted + 1
        fault = self._plan.fault_of(number)
        read = _Faulty(number, peer, batch, fault, self._clock.now(), None)
        if fault is None or fault.kind in (FaultKind.DELAY, FaultKind.SLOW, FaultKind.FLIP):
            read.inner = self._inner.post(peer, batch)
        self._reads[ReadId(number)] = read
        return ReadId(number)

    def poll(self, read: ReadId) -> Progress:
        """Report what the fault lets be seen."""
        self.land_late()
        found = self._reads.get(read)
        if found is None:
            return Progress(ReadState.FAILED, "the read is unknown: it was closed, or ended by a fence")
        fault = found.fault
        if found.inner is None:
            kind = fault.kind if fault is not None else FaultKind.STALL
            if kind is FaultKind.FAIL:
                return Progress(ReadState.FAILED, "the read failed (on purpose)")
            return Progress(ReadState.DONE if kind is FaultKind.LIE else ReadState.ACTIVE)
        progress = self._inner.poll(found.inner)
        if fault is None or progress.state is not ReadState.DONE:
            return progress
        if self._clock.now() < found.posted_s + _least_s(fault, found.batch):
            return Progress(ReadState.ACTIVE)
        if fault.kind is FaultKind.FLIP and not found.flipped:
            _flip(found.batch, random.Random(f"{self._plan.seed}/{found.number}/bit"))
            found.flipped = True
        return progress

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Wait, as long as no fault hides how one of the reads stands."""
        known = [self._reads.get(read) for read in reads]
        plain = [found.inner for found in known if found is not None and found.inner is not None and not found.fault]
        if not plain or len(plain) < len(known):
            time.sleep(timeout_s)
        else:
            self._inner.wait(plain, timeout_s)

    def close(self, read: ReadId) -> bool:
        """Close the read; whoever closes one that was never posted cannot know that it is quiet."""
        found = self._reads.pop(read, None)
        if found is None:
            return True
        if found.inner is not None:
            quiet = self._inner.close(found.inner)
        else:
            quiet = found.fault is not None and found.fault.kind is FaultKind.LIE
            if found.fault is not None and found.fault.kind is FaultKind.LATE:
                self._late.append(found)
        self._poisoned = self._poisoned or not quiet
        return quiet

    def land_late(self) -> None:
        """Let the bytes of late reads land now."""
        for read in self._late:
            inner = self._inner.post(read.peer, read.batch)
            while self._inner.poll(inner).state is ReadState.ACTIVE:
                continue
            self._inner.close(inner)
        self._late.clear()

    def fence(self) -> None:
        """Pass on; late reads land no more."""
        self._late.clear()
        self._reads.clear()
        self._inner.fence()
        self._poisoned = False

    def revoke(self) -> None:
        """Pass on."""
        self._inner.revoke()

    def shutdown(self) -> None:
        """Pass on."""
        self._late.clear()
        self._inner.shutdown()


def _least_s(fault: Fault, batch: Batch) -> float:
    """Return how long a read takes at least."""
    if fault.kind is FaultKind.SLOW:
        return float(batch.length_bytes.sum()) / fault.bytes_per_s
    return fault.delay_s if fault.kind is FaultKind.DELAY else 0.0


def _flip(batch: Batch, chance: random.Random) -> None:
    run = chance.randrange(len(batch.local))
    address = int(batch.local[run]) + chance.randrange(int(batch.length_bytes[run]))
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1 << chance.randrange(8)
