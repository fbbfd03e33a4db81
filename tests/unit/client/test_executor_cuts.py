"""Reads of parts of segments: posted once their checksums are known, and checked like whole ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client.device import TorchMemory
from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.pump import MOST_RUNS
from tensorhub_core.client.reading import ReadEnd, ReadOutcome, SourceAccess
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.client.weighted import weighted_sum
from tensorhub_core.clock import SystemClock
from tensorhub_core.config import ClientConfig
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.plan import ReadPlan, plan_read
from tensorhub_core.layout.types import Box, Checksum
from tensorhub_core.transport.base import Batch
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan, FaultyTransport
from tensorhub_core.transport.memory import MemoryTransport
from tests.unit.client.executor_world import QUICK, Counting, end_of
from tests.unit.client.reading_world import SENTINEL, Holder, Network, Record, empty_like, model
from tests.unit.client.test_device import adopt_cpu, on_device

pytestmark = pytest.mark.timeout(60)

POLICY = ExactPolicy(min_run_bytes=64, min_segment_bytes=0)
SHAPES = {"w": (96, 520), "x": (40, 260), "z": (100, 7)}
SEGMENT_BYTES = 16 << 10
WIDTH = 12
"""Columns of the fused tensor beside those of `x`."""
NEEDED_BYTES = 4 * (96 * 260 + 40 * 100 + 100 * 7)


class World:
    """One source; the destination wants half of `w`'s columns as they are, some of `x`'s in wider rows, all of `z`."""

    def __init__(
        self,
        faults: FaultPlan | None = None,
        *,
        verify: str = "always",
        checksum: Checksum = "xxh3",
        on_gpu: bool = False,
        staging_bytes: int = 1 << 20,
    ) -> None:
        self.network = Network()
        self.truth = model(1, SHAPES)
        more = {"segment_bytes": SEGMENT_BYTES, "checksum": checksum}
        self.source = self.network.holder({name: part.copy() for name, part in self.truth.items()}, **more)
        self.wanted = {"fused": np.zeros((40, 100 + WIDTH), np.float32), "w": self.truth["w"][:, 260:].copy()}
        self.wanted["z"] = self.truth["z"]
        boxes = {
            "w": [Box("w", (0, 260), (96, 260), (0, 0))],
            "fused": [Box("x", (0, 130), (40, 100), (0, WIDTH // 2))],
        }
        inner = FaultyTransport(MemoryTransport(self.network.network), faults or FaultPlan(), SystemClock())
        self.counting = Counting(inner)
        tensors = empty_like(self.wanted)
        self.destination = self.network.holder(tensors, boxes=boxes, transport=self.counting)
        fused = self.wanted["fused"].view(np.uint8)
        fused[:] = SENTINEL
        self.wanted["fused"][:, WIDTH // 2 : WIDTH // 2 + 100] = self.truth["x"][:, 130:230]
        devices = TorchMemory(adopt_cpu) if on_gpu else None
        self.place = on_device(self.destination) if on_gpu else self.destination.destination()
        self.executor = ReadExecutor(
            self.counting,
            ClientConfig(verify=verify),
            flow=QUICK,
            devices=devices,
            chance=np.random.default_rng(3),
            staging_limit_bytes=staging_bytes,
        )
        self.access = self.source.access()
        self.plan = plan_read(self.destination.memory.layout, [self.access.layout], exact=POLICY)
        assert self.plan.total_bytes == NEEDED_BYTES
        self.record = Record()

    def start(self, verified: NDArray[np.bool_] | None = None, plan: ReadPlan | None = None) -> ReadJob:
        return self.executor.start(plan or self.plan, [self.access], self.place, verified, self.record)

    def sums(self, plan: ReadPlan | None = None) -> NDArray[np.uint64]:
        return sums_of_cuts(plan or self.plan, 0, self.source)

    def read(self) -> ReadOutcome:
        """Read with all sums known from the beginning."""
        job = self.start()
        job.know("lease", 0, self.sums())
        return end_of(job)

    @property
    def read_bytes(self) -> int:
        return sum(int(batch.length_bytes.sum()) for batch in self.counting.batches)

    def arrived(self) -> bool:
        return self.destination.holds(self.wanted)


def sums_of_cuts(plan: ReadPlan, source: int, holder: Holder) -> NDArray[np.uint64]:
    """Return the checksums of a source's cuts, from numpy's own indexing of its tensors."""
    layout, table, cuts = holder.memory.layout, holder.memory.table, plan.cuts_of(source)
    digest = xxhash.xxh3_64_intdigest if layout.checksum == "xxh3" else weighted_sum
    sums = []
    for cut in range(len(cuts)):
        segment = int(cuts.segment[cut])
        name = layout.tensors[layout.storages[int(table.storage[segment])][0]].name
        flat = holder.tensors[name].reshape(-1).view(np.uint8)
        starts = (
            int(table.offset_bytes[segment])
            + cuts.offset_bytes[cut]
            + np.arange(cuts.count[cut]) * int(cuts.stride_bytes[cut])
        )
        sums.append(digest(flat[(starts[:, None] + np.arange(cuts.run_bytes[cut])).reshape(-1)].tobytes()))
    return np.array(sums, np.uint64)


@pytest.fixture
def opened() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*args: object, **more: object) -> World:
        worlds.append(World(*args, **more))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        world.executor.close()


def done_of(record: Record) -> int:
    return record.heard[-1][1] if record.heard else -1


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)


@pytest.mark.parametrize("checksum", ["xxh3", "weighted"])
@pytest.mark.parametrize("staging_bytes", [1, 1 << 20])
def test_exactly_what_is_needed_is_read_and_reported(
    opened: Callable[..., World], checksum: Checksum, staging_bytes: int
) -> None:
    world = opened(checksum=checksum, staging_bytes=staging_bytes)
    outcome = world.read()
    assert (outcome.end, outcome.done_bytes) == (ReadEnd.VERIFIED, NEEDED_BYTES)
    assert world.arrived()
    assert world.read_bytes == NEEDED_BYTES
    assert {heard[2] for heard in world.record.heard} == {NEEDED_BYTES}
    assert done_of(world.record) == NEEDED_BYTES
    remote = np.concatenate([each for batch in world.counting.batches for each in spans_of(batch)])
    assert len(np.unique(remote)) == NEEDED_BYTES, "no byte is read twice"
    begin = world.source.tensors["w"].ctypes.data
    inside = remote[(remote >= begin) & (remote < begin + 4 * 96 * 520)] - begin
    assert (inside % 2080 >= 1040).all(), "of the other half of the columns nothing is read"


def spans_of(batch: Batch) -> list[NDArray[np.int64]]:
    """Return the addresses that a batch reads, by run."""
    runs = zip(batch.remote.tolist(), batch.length_bytes.tolist(), strict=True)
    return [np.arange(begin, begin + length, dtype=np.int64) for begin, length in runs]


def test_a_cut_whose_sum_is_not_known_is_not_read_and_the_rest_is(opened: Callable[..., World]) -> None:
    world = opened()
    job = world.start()
    whole_bytes = int(world.plan.length_bytes[world.plan.cut < 0].sum())
    assert whole_bytes == 2800
    until(lambda: done_of(world.record) == whole_bytes)
    time.sleep(2 * QUICK.stall_timeout_s)
    assert world.read_bytes == whole_bytes
    assert job.wait(0) is None, "waiting for sums is nobody's stall"
    assert (world.destination.tensors["w"].reshape(-1).view(np.uint8) == SENTINEL).all()
    job.cancel()
    outcome = end_of(job)
    assert (outcome.end, outcome.done_bytes) == (ReadEnd.CANCELLED, whole_bytes)


def test_sums_may_come_in_any_order_and_only_their_cuts_are_read(opened: Callable[..., World]) -> None:
    world = opened()
    sums, lengths = world.sums(), world.plan.cuts_of(0).length_bytes
    job = world.start()
    until(lambda: world.read_bytes == 2800)
    job.know("another", 0, sums)
    job.know("lease", len(sums), sums)
    job.know("lease", -1, sums)
    expected = 2800
    for first, count in [(4, 2), (0, 1), (9, 3)]:
        job.know("lease", first, sums[first : first + count])
        expected += int(lengths[first : first + count].sum())
        until(lambda wanted=expected: done_of(world.record) == wanted)  # type: ignore[misc]
        assert world.read_bytes == expected
    job.know("lease", 0, np.zeros(2, np.uint64)[:1])  # what was heard once stays
    job.know("lease", 0, np.concatenate([sums, sums]))
    assert end_of(job).end is ReadEnd.VERIFIED
    assert world.arrived()
    assert world.read_bytes == NEEDED_BYTES


@pytest.mark.parametrize("read", range(4))
def test_a_cut_that_is_wrong_once_is_read_again(opened: Callable[..., World], read: int) -> None:
    world = opened(FaultPlan(reads={read: Fault(FaultKind.FLIP)}))
    outcome = world.read()
    assert (outcome.end, outcome.rereads) == (ReadEnd.VERIFIED, 1)
    assert world.arrived()
    assert world.read_bytes > NEEDED_BYTES


def test_bytes_that_do_not_match_the_sum_of_their_cut_are_corrupt(opened: Callable[..., World]) -> None:
    world = opened()
    sums = world.sums()
    at = int(np.flatnonzero(~world.plan.direct)[0])
    sums[world.plan.cut[at]] ^= np.uint64(1)
    job = world.start()
    job.know("lease", 0, sums)
    outcome = end_of(job)
    assert (outcome.end, outcome.kind, outcome.rereads) == (ReadEnd.SOURCE_FAILED, "corrupt", 1)
    assert not outcome.verified[at]
    segment = world.destination.tensors["fused"]
    assert segment.shape == (40, 100 + WIDTH)
    box = world.plan.scatters[at][0]
    rows = segment[box.dst_start[0] : box.dst_start[0] + box.shape[0]]
    assert (rows.view(np.uint8) == SENTINEL).all(), "what is wrong is not scattered"


def test_a_sum_of_the_whole_segment_does_not_pass_for_that_of_a_cut(opened: Callable[..., World]) -> None:
    world = opened()
    job = world.start()
    job.know("lease", 0, world.access.sums[world.plan.cuts_of(0).segment])
    outcome = end_of(job)
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "corrupt")


def test_without_verification_nothing_waits_for_sums(opened: Callable[..., World]) -> None:
    world = opened(verify="off")
    assert end_of(world.start()).end is ReadEnd.VERIFIED
    assert world.arrived()


def test_samples_wait_for_their_sums_and_the_others_do_not(opened: Callable[..., World]) -> None:
    world = opened(verify="sampled")
    job = world.start()
    chosen = job.checker.chosen
    assert chosen is not None
    waiting = chosen & (job.schedule.cut >= 0)
    assert waiting.any()
    before = NEEDED_BYTES - int(job.schedule.length_bytes[waiting].sum())
    until(lambda: done_of(world.record) == before)
    time.sleep(0.05)
    assert world.read_bytes == before
    job.know("lease", 0, world.sums())
    assert end_of(job).end is ReadEnd.VERIFIED
    assert world.arrived()


@pytest.mark.parametrize("checksum", ["xxh3", "weighted"])
def test_cuts_fill_devices_through_the_host(opened: Callable[..., World], checksum: Checksum) -> None:
    world = opened(checksum=checksum, on_gpu=True)
    assert world.read().end is ReadEnd.VERIFIED
    assert world.arrived()
    assert world.read_bytes == NEEDED_BYTES


def test_what_is_verified_is_not_read_again_and_cuts_keep_their_numbers(opened: Callable[..., World]) -> None:
    world = opened()
    sums = world.sums()
    job = world.start()
    job.know("lease", 0, sums[:5])
    until(lambda: world.read_bytes == 2800 + int(world.plan.cuts_of(0).length_bytes[:5].sum()))
    until(lambda: done_of(world.record) == world.read_bytes)
    job.cancel()
    outcome = end_of(job)
    assert int(outcome.verified.sum()) == 5 + int((world.plan.cut < 0).sum())
    job = world.start(outcome.verified)
    job.know("lease", 5, sums[5:])
    assert end_of(job).end is ReadEnd.VERIFIED
    assert world.arrived()
    assert world.read_bytes == NEEDED_BYTES


def test_cuts_of_more_runs_than_a_batch_may_have_are_posted_in_parts() -> None:
    network, truth = Network(), model(2, {"w": (20_000, 32)})["w"]
    source = network.holder({"w": truth.copy()}, segment_bytes=1 << 20)
    counting = Counting(MemoryTransport(network.network))
    wanted = {"w": np.ascontiguousarray(truth[:, 8:24])}
    boxes = {"w": [Box("w", (0, 8), (20_000, 16), (0, 0))]}
    destination = network.holder(empty_like(wanted), boxes=boxes, transport=counting)
    access = source.access()
    plan = plan_read(destination.memory.layout, [access.layout], exact=replace(POLICY, min_run_bytes=1))
    assert plan.cuts.count.max() == 8192
    executor = ReadExecutor(counting)
    job = executor.start(plan, [access], destination.destination(), None, Record())
    job.know("lease", 0, sums_of_cuts(plan, 0, source))
    outcome = end_of(job)
    executor.close()
    assert outcome.end is ReadEnd.VERIFIED
    assert destination.holds(wanted)
    assert max(len(batch.local) for batch in counting.batches) <= MOST_RUNS
    assert len(counting.batches) <= 40
    assert sum(int(batch.length_bytes.sum()) for batch in counting.batches) == wanted["w"].nbytes


def two_halves() -> tuple[Network, dict[str, NDArray[np.generic]], list[Holder]]:
    """Return a tensor and two sources of its upper and lower rows."""
    network, truth = Network(), model(3, {"w": (64, 512)})
    halves = [
        network.holder(
            {"w": truth["w"][32 * shard : 32 * shard + 32].copy()},
            boxes={"w": [Box("w", (32 * shard, 0), (32, 512), (0, 0))]},
            shard=shard,
            num_shards=2,
            segment_bytes=SEGMENT_BYTES,
        )
        for shard in range(2)
    ]
    return network, {"w": np.ascontiguousarray(truth["w"][:, 128:256])}, halves


def test_a_source_whose_sums_are_late_does_not_keep_the_other() -> None:
    network, wanted, halves = two_halves()
    counting = Counting(MemoryTransport(network.network))
    boxes = {"w": [Box("w", (0, 128), (64, 128), (0, 0))]}
    destination = network.holder(empty_like(wanted), boxes=boxes, transport=counting)
    sources: list[SourceAccess] = [half.access(f"lease-{shard}") for shard, half in enumerate(halves)]
    plan = plan_read(destination.memory.layout, [source.layout for source in sources], exact=POLICY)
    executor, record = ReadExecutor(counting, flow=QUICK), Record()
    job = executor.start(plan, sources, destination.destination(), None, record)
    job.know("lease-1", 0, sums_of_cuts(plan, 1, halves[1]))
    until(lambda: done_of(record) == wanted["w"].nbytes // 2)
    time.sleep(0.05)
    assert job.wait(0) is None
    job.know("lease-0", 0, sums_of_cuts(plan, 0, halves[0]))
    assert end_of(job).end is ReadEnd.VERIFIED
    executor.close()
    assert destination.holds(wanted)
