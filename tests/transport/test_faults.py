"""The faulty transport breaks exactly what its plan says, the same way every time."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import PeerId, ReadId, ReadState, Region
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan, FaultyTransport
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tests.transport.lab import SENTINEL, batch


class StepClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now(self) -> float:
        return self.at_s


class World:
    """A source and a faulty reader of it."""

    def __init__(self, plan: FaultPlan) -> None:
        network = MemoryNetwork()
        self.clock = StepClock()
        self.source = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
        self.memory = np.full(4096, SENTINEL, np.uint8)
        serving = MemoryTransport(network)
        serving.register([Region(self.source.ctypes.data, 4096)])
        self.description = serving.describe()
        self.reader = FaultyTransport(MemoryTransport(network), plan, self.clock)
        self.reader.register([Region(self.memory.ctypes.data, 4096)])

    def attach(self) -> PeerId:
        return self.reader.attach(self.description)

    def post(self, peer: PeerId) -> ReadId:
        return self.reader.post(peer, batch((self.memory.ctypes.data, self.source.ctypes.data, 4096)))


def world(kind: FaultKind, **figures: float) -> World:
    return World(FaultPlan(reads={0: Fault(kind, **figures)}))


@pytest.mark.parametrize(
    ("kind", "state", "quiet", "wrong_bits"),
    [
        (FaultKind.FLIP, ReadState.DONE, True, 1),
        (FaultKind.LIE, ReadState.DONE, True, None),
        (FaultKind.FAIL, ReadState.FAILED, False, None),
        (FaultKind.STALL, ReadState.ACTIVE, False, None),
        (FaultKind.LATE, ReadState.ACTIVE, False, None),
    ],
)
def test_every_fault_does_what_it_says(kind: FaultKind, state: ReadState, quiet: bool, wrong_bits: int | None) -> None:
    here = world(kind)
    read = here.post(here.attach())
    for _ in range(3):
        assert here.reader.poll(read).state is state
    if wrong_bits is None:
        assert (here.memory == SENTINEL).all()
    else:
        assert int(np.unpackbits(here.memory ^ here.source).sum()) == wrong_bits
    assert here.reader.close(read) is quiet


@pytest.mark.parametrize(
    "fault",
    [Fault(FaultKind.DELAY, delay_s=2.0), Fault(FaultKind.SLOW, bytes_per_s=2048.0)],
    ids=lambda f: f.kind.value,
)
def test_late_and_slow_reads_end_in_their_time(fault: Fault) -> None:
    here = World(FaultPlan(reads={0: fault}))
    read = here.post(here.attach())
    here.clock.at_s = 1.9
    assert here.reader.poll(read).state is ReadState.ACTIVE
    here.clock.at_s = 2.0
    assert here.reader.poll(read).state is ReadState.DONE
    assert np.array_equal(here.memory, here.source)


def test_late_bytes_land_after_the_close_unless_there_was_a_fence() -> None:
    for fence in (False, True):
        here = world(FaultKind.LATE)
        peer = here.attach()
        read = here.post(peer)
        assert not here.reader.close(read)
        with pytest.raises(TransportError, match="fence"):
            here.post(peer)
        if fence:
            here.reader.fence()
        here.reader.land_late()
        assert np.array_equal(here.memory, here.source) is not fence


def test_a_peer_can_be_unreachable() -> None:
    here = World(FaultPlan(unreachable=frozenset({0, 2})))
    for works in (False, True, False, True):
        if works:
            here.attach()
        else:
            with pytest.raises(TransportError):
                here.attach()


def test_chance_is_decided_by_the_seed_alone() -> None:
    fault = Fault(FaultKind.FAIL)
    plans = [FaultPlan(chances={fault: 0.3}, seed=seed) for seed in (1, 1, 2)]
    drawn = [[plan.fault_of(number) for number in range(1000)] for plan in plans]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert 250 < sum(each is fault for each in drawn[0]) < 350
