"""Copies in host memory: byte for byte what the original is by its checksums, or none."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.offload_copy import OffloadMemory, Original, batches_of, storage_lengths
from tensorhub_core.client.staged_memory import storage_lengths as lengths_of_storages
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.errors import CorruptTransfer
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.state.messages import PutBlob
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport


def blob(data: bytes) -> PutBlob:
    return PutBlob(digest_of(data), data)


def original_of(memory: RegisteredMemory, number: int = 7) -> Original:
    memory.collect()
    return Original((1, number), memory, blob(memory.layout_blob), blob(pack_sums(memory.sums())))


def copied(original: Original, **more: Any) -> tuple[OffloadMemory, bool]:
    copy = OffloadMemory(original, MemoryTransport(MemoryNetwork()))
    return copy, copy.fill(original, more.pop("stop", lambda: False), **more)


def tensors(seed: int) -> dict[str, Any]:
    """Return tensors of many kinds: large and tiny, empty, scalar, strided, and two names of one."""
    rng = np.random.default_rng(seed)
    tied = torch.from_numpy(rng.integers(0, 256, (64, 33), np.uint8))
    made: dict[str, Any] = {f"small.{i}": rng.random(int(rng.integers(1, 40)), np.float32) for i in range(300)}
    made["large"] = torch.from_numpy(rng.integers(0, 256, (700, 5000), np.uint8))
    made["strided"] = torch.from_numpy(rng.random((40, 50))).t()
    made |= {"empty": np.empty((0, 3), np.float32), "scalar": torch.tensor(1.5), "tied.a": tied, "tied.b": tied}
    return made


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_every_storage_has_its_bytes(threads: int, segment_bytes: int) -> None:
    given_tensors = tensors(3)
    memory = RegisteredMemory(given_tensors, segment_bytes=segment_bytes)
    copy, whole = copied(original_of(memory), threads=threads)
    assert whole
    buffers = copy._arena.buffers
    for storage, buffer in zip(memory.storages, buffers, strict=True):
        source = given_tensors[storage.names[0]]
        dense = source.contiguous().numpy() if isinstance(source, torch.Tensor) else source
        assert buffer.tobytes() == dense.tobytes(), storage.names
    assert copy.held.total_bytes == memory.total_bytes == sum(len(buffer) for buffer in buffers)


def test_the_lengths_of_storages_are_what_their_segments_add_up_to() -> None:
    memory = RegisteredMemory(tensors(4), segment_bytes=4096)
    assert tuple(storage_lengths(memory.table, len(memory.storages))) == lengths_of_storages(memory)


def test_nothing_at_all_can_be_copied_too() -> None:
    copy, whole = copied(original_of(RegisteredMemory({"none": np.empty(0, np.float32)})))
    assert whole
    assert copy.held.total_bytes == 0


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_a_changed_original_is_noticed(place: int) -> None:
    weights = np.arange(3_000_000, dtype=np.uint32)
    original = original_of(RegisteredMemory({"w": weights}))
    weights[place] ^= 1
    with pytest.raises(CorruptTransfer, match="version 7 any more"):
        copied(original)
    _, whole = copied(original, check=False)
    assert whole, "the policy verify=off takes what there is"


def test_a_change_during_the_copy_is_no_harm_or_noticed() -> None:
    """What is checked is the copy: bytes that change after they were copied do not matter, before they do."""
    weights = np.zeros(20_000_000, np.uint8)
    memory = RegisteredMemory({"w": weights})
    original, looks = original_of(memory), []

    def change_what_was_copied() -> bool:
        looks.append(None)
        if len(looks) == 2:
            weights[:100] = 1
        return False

    copy, whole = copied(original, stop=change_what_was_copied, threads=1)
    assert whole
    assert not copy._arena.buffers[0].any()


def test_it_stops_when_it_is_told_to() -> None:
    original, asked = original_of(RegisteredMemory({"w": np.ones(50_000_000, np.uint8)})), threading.Event()

    def stop() -> bool:
        was, _ = asked.is_set(), asked.set()
        return was

    copy = OffloadMemory(original, MemoryTransport(MemoryNetwork()))
    copy._arena.buffers[0][:] = 0
    assert not copy.fill(original, stop, threads=1)
    filled = int(copy._arena.buffers[0][:: 1 << 20].astype(bool).sum())
    assert filled < 20, "only the first batch"


def test_device_memory_comes_through_the_host() -> None:
    weights = np.arange(300_000, dtype=np.uint16)
    memory = RegisteredMemory({"w": weights, "v": np.ones(10)}, checksum="weighted", segment_bytes=4096)
    original = original_of(memory)
    memory.buffers, memory.devices = (None, memory.buffers[1]), ("cuda:1", "cpu")
    index = {storage.names[0]: number for number, storage in enumerate(memory.storages)}
    if index["w"] != 0:
        memory.buffers, memory.devices = (memory.buffers[1], None), ("cpu", "cuda:1")
    runs: list[tuple[str, int]] = []
    flat = weights.view(np.uint8)

    def read(device: str, address: int, length: int) -> memoryview:
        runs.append((device, length))
        at = address - flat.ctypes.data
        return flat[at : at + length].data

    memory.buffers = tuple(None if n == index["w"] else b for n, b in enumerate(memory.buffers))
    copy, whole = copied(original, read_device=read)
    assert whole
    assert copy._arena.buffers[index["w"]].tobytes() == weights.tobytes()
    assert {device for device, _ in runs} == {"cuda:1"}
    assert len(runs) == 1, "segments that lie in a row come in one piece"


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=40), batch=st.integers(1, 20_000))
def test_batches_cover_all_segments_once(sizes: list[int], batch: int) -> None:
    table = RegisteredMemory({str(i): np.zeros(n, np.uint8) for i, n in enumerate(sizes)}, segment_bytes=4096).table
    batches = batches_of(table, batch)
    assert [n for begin, end in batches for n in range(begin, end)] == list(range(len(table)))
    assert all(int(table.length_bytes[begin : end - 1].sum()) < batch for begin, end in batches)
