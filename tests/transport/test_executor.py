"""The executor over every transport, from real processes that are killed or stopped while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.reading import Destination, ReadEnd, ReadOutcome, SourceAccess
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.transport.registry import make_transport
from tests.transport.lab import PEER_BYTES, SENTINEL, ProcessPeer, needs_nixl

pytestmark = pytest.mark.timeout(180)

NIXL = [pytest.param(path, marks=needs_nixl) for path in ("nixl", "nixl-tcp")]
SEED = 5
SMALL_STEPS = FlowSettings(chunk_bytes=256 << 10, most_chunk_bytes=256 << 10, window=4, stall_timeout_s=1.0)


class Reader:
    """A destination filled through the executor, and what to do once half of it is there."""

    def __init__(self, name: str) -> None:
        self.tensor = np.full(PEER_BYTES, SENTINEL, np.uint8)
        self.memory = RegisteredMemory({"w": self.tensor}, segment_bytes=512 << 10)
        self.transport = make_transport(name)
        self.transport.register(self.memory.regions())
        self.executor = ReadExecutor(self.transport, flow=SMALL_STEPS)
        self.at_half: Callable[[], None] = lambda: None
        self.fetched_bytes = 0

    def access(self, peer: ProcessPeer, lease: str) -> SourceAccess:
        """Describe a peer as a source of the tensor."""
        truth = RegisteredMemory({"w": peer.data}, segment_bytes=512 << 10)
        sums = truth.sums()
        return SourceAccess(
            lease=lease,
            replica=lease,
            description=peer.description,
            layout=truth.layout,
            table=truth.table,
            addresses=np.array([peer.address], np.uint64),
            devices=("cpu",),
            sums=sums,
            prefix=len(sums),
        )

    def read(self, source: SourceAccess, verified: np.ndarray | None = None) -> ReadOutcome:
        """Read what is missing."""
        memory = self.memory
        plan = plan_read(memory.layout, [source.layout])
        here = Destination(memory.layout, memory.table, memory.addresses, memory.devices, memory.buffers)
        outcome = self.executor.start(plan, [source], here, verified, self).wait(60)
        assert outcome is not None
        return outcome

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Act once, at half."""
        if done_bytes >= total_bytes // 2:
            act, self.at_half = self.at_half, lambda: None
            act()

    def close(self) -> None:
        """End the threads and the agents."""
        self.executor.close()
        self.transport.shutdown()


each_path = pytest.mark.parametrize("path", ["auto", "tcp", *NIXL], indirect=True)
each_wire = pytest.mark.parametrize("path", ["tcp", NIXL[1]], indirect=True)
"""The paths that need the source to answer; `auto` reads the memory of a stopped process."""


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a transport's name, with UCX's environment set for `nixl-tcp`."""
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return str(request.param).partition("-")[0]


@pytest.fixture
def reader(path: str) -> Iterator[Reader]:
    opened = Reader(path)
    yield opened
    opened.close()


@pytest.fixture
def peers() -> Iterator[list[ProcessPeer]]:
    started: list[ProcessPeer] = []
    yield started
    for peer in started:
        peer.end()


@each_path
def test_another_holder_finishes_what_a_killed_one_began(path: str, reader: Reader, peers: list[ProcessPeer]) -> None:
    peers += [ProcessPeer(path, SEED), ProcessPeer(path, SEED)]
    reader.at_half = peers[0].kill
    first = reader.read(reader.access(peers[0], "first"))
    assert (first.end, first.kind, first.lease) == (ReadEnd.SOURCE_FAILED, "lost", "first")
    assert PEER_BYTES // 2 <= first.done_bytes < PEER_BYTES
    second = reader.read(reader.access(peers[1], "second"), first.verified)
    assert second.end is ReadEnd.VERIFIED
    assert np.array_equal(reader.tensor, peers[1].data)


@each_wire
def test_a_stopped_holder_is_left_and_writes_nothing_when_it_goes_on(
    path: str, reader: Reader, peers: list[ProcessPeer]
) -> None:
    peers += [ProcessPeer(path, SEED), ProcessPeer(path, SEED)]
    reader.at_half = peers[0].stop
    first = reader.read(reader.access(peers[0], "first"))
    assert (first.end, first.kind) == (ReadEnd.SOURCE_FAILED, "stalled")
    assert first.fenced == (path == "nixl"), "only reads that go on by themselves need a fence"
    reader.tensor[:] = SENTINEL
    peers[0].go_on()
    second = reader.read(reader.access(peers[1], "second"), np.ones_like(first.verified))
    assert second.end is ReadEnd.VERIFIED
    assert (reader.tensor == SENTINEL).all()


@each_path
def test_many_small_tensors_and_another_layout(path: str, reader: Reader, peers: list[ProcessPeer]) -> None:
    peers.append(ProcessPeer(path, SEED))
    chance = np.random.default_rng(1)
    lengths = chance.integers(1, 3000, 3000)
    begins = np.cumsum(lengths) - lengths
    names = [f"{number:04}" for number in range(len(lengths))]
    order = chance.permutation(len(lengths))
    into = np.full(int(lengths.sum()), SENTINEL, np.uint8)
    places = dict(zip(order.tolist(), (np.cumsum(lengths[order]) - lengths[order]).tolist(), strict=True))
    tensors = {name: into[places[at] : places[at] + lengths[at]] for at, name in enumerate(names)}
    truth = {name: peers[0].data[begins[at] : begins[at] + lengths[at]] for at, name in enumerate(names)}
    memory = RegisteredMemory(tensors)
    source = RegisteredMemory(truth)
    reader.transport.register(memory.regions())
    addresses = source.addresses - np.uint64(peers[0].data.ctypes.data) + np.uint64(peers[0].address)
    sums = source.sums()
    access = SourceAccess(
        "lease", "r", peers[0].description, source.layout, source.table, addresses, source.devices, sums, len(sums)
    )
    plan = plan_read(memory.layout, [source.layout])
    here = Destination(memory.layout, memory.table, memory.addresses, memory.devices, memory.buffers)
    outcome = reader.executor.start(plan, [access], here, None, reader).wait(60)
    assert outcome is not None
    assert outcome.end is ReadEnd.VERIFIED
    assert all(np.array_equal(tensors[name], truth[name]) for name in names)
