"""What is done to memory of devices: the same operations, on memory of the CPU that passes for a device's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tensorhub_core.client.device import TorchMemory
from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.reading import Destination, ReadEnd
from tensorhub_core.client.weighted import ROW_WORDS, weighted_sum, weighted_sums_of
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.scatter import Scatter, scatter_bytes
from tensorhub_core.layout.types import Box, Checksum
from tests.unit.client.executor_world import QUICK, end_of
from tests.unit.client.reading_world import Holder, Network, Record, empty_like, model

pytestmark = pytest.mark.timeout(60)
ROW = 8 * ROW_WORDS
SIZES = [1, 7, 8, 9, ROW - 1, ROW, ROW + 1, 3 * ROW, 3 * ROW + 5, 300_001]


def adopt_cpu(device: str, address: int, length_bytes: int) -> torch.Tensor:
    """Take memory of the CPU for a device's."""
    assert device.startswith("cuda")
    return torch.frombuffer((ctypes.c_uint8 * length_bytes).from_address(address), dtype=torch.uint8)


def drawn(size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def slow_sum(data: bytes) -> int:
    """Compute the definition with Python's own integers."""
    mask = (1 << 64) - 1
    padded = data + bytes(-len(data) % ROW)
    total = 0
    for row in range(len(padded) // ROW):
        words = [
            int.from_bytes(padded[row * ROW + 8 * at : row * ROW + 8 * at + 8], "little") for at in range(ROW_WORDS)
        ]
        found = sum((word ^ (word >> 32)) * (2 * at + 1) * 0x9E3779B97F4A7C15 for at, word in enumerate(words)) & mask
        found ^= found >> 32
        total += found * (2 * row + 1) * 0xC2B2AE3D27D4EB4F
    return (total + len(data) * 0x165667B19E3779F9) & mask


@pytest.mark.parametrize("size", SIZES)
def test_host_and_device_compute_the_definition(size: int) -> None:
    data = drawn(size + 3)
    for start in (0, 3):  # also where words are not aligned
        run = data[start : start + size]
        assert weighted_sum(run.data) == slow_sum(run.tobytes())
        assert weighted_sums_of([torch.from_numpy(run)]).tolist() == [slow_sum(run.tobytes())]


def test_nothing_has_a_sum_too() -> None:
    assert weighted_sum(b"") == 0
    assert len(weighted_sums_of([])) == 0


def test_every_kind_of_change_is_found() -> None:
    data = drawn(3 * ROW + 40)
    true = weighted_sum(data.data)
    changed = []
    for at in [*range(0, len(data), 97), len(data) - 1]:
        for bit in (1, 128):
            other = data.copy()
            other[at] ^= bit
            changed.append(other)
    words, rows = data[: 3 * ROW].view(np.uint64).copy(), data[: 3 * ROW].reshape(3, ROW)
    words[[0, 1]] = words[[1, 0]]
    for first, second in [(0, 1), (5, 1029), (700, 2900)]:
        for bit in (0, 15, 31, 47, 63):  # the same bit of two words, as of two signs
            other = data.copy()
            other[: 3 * ROW].view(np.uint64)[[first, second]] ^= np.uint64(1 << bit)
            changed.append(other)
    changed += [np.concatenate((words.view(np.uint8), data[3 * ROW :]))]
    changed += [np.concatenate((rows[[1, 0, 2]].reshape(-1), data[3 * ROW :]))]
    changed += [np.roll(data, 8), np.roll(data, 1), data[:-1], np.append(data, np.uint8(0)), np.zeros_like(data)]
    changed += [np.concatenate((np.zeros(ROW, np.uint8), data[ROW:]))]
    sums = [weighted_sum(other.data) for other in changed]
    assert true not in sums


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("shape", "segment_shape", "scatter"),
    [
        ((6, 8), (3, 8), Scatter(0, (2, 0), (0, 0), (3, 8))),
        ((6, 8), (4, 5), Scatter(0, (1, 3), (1, 2), (3, 2))),
        ((5, 4, 6), (4, 6), Scatter(0, (3, 0, 0), (0, 0), (1, 4, 6))),
        ((4, 6), (5, 4, 6), Scatter(0, (0, 1), (2, 0, 0), (1, 4, 5))),
        ((), (), Scatter(0, (), (), ())),
    ],
)
def test_scattering_on_a_device_is_scattering(
    item_bytes: int, shape: tuple[int, ...], segment_shape: tuple[int, ...], scatter: Scatter
) -> None:
    segment = drawn(int(np.prod(segment_shape, dtype=int)) * item_bytes, 1)
    here = np.full(int(np.prod(shape, dtype=int)) * item_bytes, 0xA5, np.uint8)
    there = here.copy()
    scatter_bytes(segment, segment_shape, scatter, here, shape, item_bytes)
    address = there.ctypes.data
    TorchMemory(adopt_cpu).scatter(segment, segment_shape, scatter, "cuda:0", address, shape, item_bytes)
    assert np.array_equal(here, there)
    assert (here != 0xA5).any()


def on_device(holder: Holder) -> Destination:
    """Return a holder's memory as the executor sees a device's."""
    here = holder.destination()
    return Destination(
        here.layout, here.table, here.addresses, ("cuda:0",) * len(here.devices), [None] * len(here.buffers)
    )


def read(sources: Sequence[Holder], destination: Holder, *, cast: bool = False) -> ReadEnd:
    access = [source.access(f"lease-{number}") for number, source in enumerate(sources)]
    executor = ReadExecutor(destination.transport, flow=QUICK, devices=TorchMemory(adopt_cpu))
    plan = plan_read(destination.memory.layout, [source.layout for source in access], cast=cast)
    outcome = end_of(executor.start(plan, access, on_device(destination), None, Record()))
    executor.close()
    return outcome.end


@pytest.mark.parametrize("checksum", ["xxh3", "weighted"])
def test_a_device_is_filled_from_memory_of_cpus_through_the_host(checksum: Checksum) -> None:
    network, truth = Network(), model(1, {"a": (400, 64), "b": (3,), "empty": (0, 9), "scalar": ()})
    source = network.holder({name: tensor.copy() for name, tensor in truth.items()}, checksum=checksum)
    destination = network.holder(empty_like(truth), checksum=checksum)
    assert read([source], destination) is ReadEnd.VERIFIED
    assert destination.holds(truth)
    source.tensors["a"].reshape(-1).view(np.uint8)[5] ^= 1
    again = network.holder(empty_like(truth), checksum=checksum)
    access = source.access()
    source.tensors["a"].reshape(-1).view(np.uint8)[5] ^= 1
    executor = ReadExecutor(again.transport, flow=QUICK, devices=TorchMemory(adopt_cpu))
    plan = plan_read(again.memory.layout, [access.layout])
    outcome = end_of(executor.start(plan, [access], on_device(again), None, Record()))
    executor.close()
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "corrupt")


@pytest.mark.parametrize("checksums", [("xxh3", "weighted"), ("weighted", "xxh3")])
def test_layouts_with_other_checksums_read_each_other(checksums: tuple[Checksum, Checksum]) -> None:
    network, truth = Network(), model(2, {"w": (96, 130), "v": (7,)})
    source = network.holder({name: tensor.copy() for name, tensor in truth.items()}, checksum=checksums[0])
    destination = network.holder(empty_like(truth), checksum=checksums[1])
    access = source.access()
    plan = plan_read(destination.memory.layout, [access.layout])
    executor = ReadExecutor(destination.transport, flow=QUICK)
    outcome = end_of(executor.start(plan, [access], destination.destination(), None, Record()))
    executor.close()
    assert outcome.end is ReadEnd.VERIFIED
    assert destination.holds(truth)
    assert source.memory.sums().tolist() != destination.memory.sums().tolist(), "they are summed in different ways"


@pytest.mark.parametrize("checksum", ["xxh3", "weighted"])
def test_a_device_is_filled_from_another_layout(checksum: Checksum) -> None:
    network, truth = Network(), model(5, {"w": (96, 130)})["w"]
    halves = [
        network.holder(
            {"w": np.ascontiguousarray(truth[:, 65 * shard : 65 * shard + 65])},
            boxes={"w": [Box("w", (0, 65 * shard), (96, 65), (0, 0))]},
            shard=shard,
            num_shards=2,
            segment_bytes=4096,
            checksum=checksum,
        )
        for shard in range(2)
    ]
    destination = network.holder(empty_like({"w": truth}))
    assert read(halves, destination) is ReadEnd.VERIFIED
    assert destination.holds({"w": truth})


@pytest.mark.parametrize(
    "pair", [(np.float64, np.float16), (np.float16, np.float32), (np.float32, np.float64)], ids=str
)
def test_a_device_is_filled_with_numbers_that_the_host_has_converted(pair: tuple[type, type]) -> None:
    network = Network()
    truth = {
        "w": np.linspace(-70_000, 70_000, 96 * 130).reshape(96, 130),
        "v": np.array(1 / 3),
        "none": np.zeros((0, 3)),
    }
    given = {name: array.astype(np.float32).astype(pair[0]) for name, array in truth.items() if name != "w"}
    with np.errstate(over="ignore"):
        given["w"] = truth["w"].astype(np.float32).astype(pair[0])
        right = {name: array.astype(np.float32).astype(pair[1]) for name, array in given.items()}
    halves = [
        network.holder(
            {**given, "w": np.ascontiguousarray(given["w"][:, 65 * shard : 65 * shard + 65])},
            boxes={"w": [Box("w", (0, 65 * shard), (96, 65), (0, 0))]},
            shard=shard,
            num_shards=2,
            segment_bytes=4096,
        )
        for shard in range(2)
    ]
    destination = network.holder(empty_like(right))
    assert read(halves, destination, cast=True) is ReadEnd.VERIFIED
    assert destination.holds(right)
