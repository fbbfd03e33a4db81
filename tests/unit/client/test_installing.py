"""The local copy of an install: everything once, in place, until it is stopped."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.client.installing import CopyList, LocalCopy, copy_threads, list_copies
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.reading import ReadEnd
from tensorhub_core.client.staged_memory import Arena, StagedMemory, padded_storages, storage_lengths
from tensorhub_core.layout.types import Box

pytestmark = pytest.mark.timeout(30)


class Observer:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        self.heard.append((done_bytes, total_bytes))


def staged_for(tensors: dict[str, Any], **more: Any) -> tuple[RegisteredMemory, StagedMemory]:
    """Register tensors and fill staging memory for them with noise."""
    live = RegisteredMemory(tensors, **more)
    staged = StagedMemory(live, Arena(storage_lengths(live)))
    rng = np.random.default_rng(1)
    for buffer in staged.buffers:
        assert buffer is not None
        buffer[:] = rng.integers(0, 256, len(buffer), np.uint8)
    return live, staged


def sizes_of(chance: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    lengths = chance.choice([0, 1, 63, 64, 65, 999, 4096, 20_000, 100_001], chance.integers(1, 40))
    return {f"t{k:03}": np.zeros(int(n), np.uint8) for k, n in enumerate(lengths)}


@pytest.mark.parametrize("seed", range(12))
def test_every_byte_is_copied_once_to_its_place(seed: int) -> None:
    chance = np.random.default_rng(seed)
    tensors, chunk = sizes_of(chance), int(chance.choice([1000, 4096, 1 << 20]))
    live, staged = staged_for(tensors)
    copies = list_copies(live, staged, chunk)
    runs = sorted(run for part in copies.chunks for run in part)
    assert sum(length for _, _, length in runs) == copies.total_bytes == sum(t.nbytes for t in tensors.values())
    assert all(a + n <= b for (a, _, n), (b, _, _) in itertools.pairwise(runs)), "nothing twice"
    assert all(0 < sum(run[2] for run in part) <= chunk for part in copies.chunks)
    observer = Observer()
    outcome = LocalCopy(copies, observer, threads=int(chance.integers(1, 5))).wait(10)
    assert outcome is not None
    assert (outcome.end, outcome.done_bytes) == (ReadEnd.VERIFIED, copies.total_bytes)
    for number, storage in enumerate(live.storages):
        buffer = staged.buffers[number]
        assert buffer is not None
        assert tensors[storage.names[0]].tobytes() == buffer.tobytes()
    assert observer.heard[-1] == (copies.total_bytes, copies.total_bytes)
    assert sorted(observer.heard) == observer.heard


def test_staging_memory_lies_apart_and_aligned() -> None:
    arena = Arena([0, 1, 64, 5000, 0, 3])
    spans = [(int(a), len(b)) for a, b in zip(arena.addresses, arena.buffers, strict=True) if len(b)]
    assert [length for _, length in spans] == [1, 64, 5000, 3]
    assert all(address % 64 == 0 for address, _ in spans)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    (region,) = arena.regions()
    assert all(region.address <= a and a + n <= region.address + region.length_bytes for a, n in spans)
    empty = [Arena([0, 0]), Arena([0]), Arena([0, 0])]
    places = {region.address for each in empty for region in each.regions()}
    assert len(places) == len(empty), "copies are told apart by their places, empty ones too"


def test_a_copy_that_is_cancelled_ends_and_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": np.zeros(1 << 20, np.uint8)}
    live, staged = staged_for(tensors)
    reached, go = threading.Event(), threading.Event()

    class Slow(Observer):
        def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
            reached.set()
            go.wait(10)

    copy = LocalCopy(list_copies(live, staged, 4096), Slow(), threads=1)
    assert reached.wait(10)
    assert copy.wait(0.05) is None
    copy.cancel()
    go.set()
    outcome = copy.wait(10)
    assert outcome is not None
    assert outcome.end is ReadEnd.CANCELLED
    then = tensors["w"].copy()
    time.sleep(0.05)
    assert 0 < (then != 0).sum() < len(then)
    assert (tensors["w"] == then).all()


def test_what_breaks_a_copy_is_raised_when_no_thread_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    live, staged = staged_for({"w": np.zeros(1 << 20, np.uint8)})
    monkeypatch.setattr(LocalCopy, "_fill_devices", lambda self: 1 / 0)
    copy = LocalCopy(list_copies(live, staged, 4096), Observer(), threads=3)
    with pytest.raises(ZeroDivisionError):
        copy.wait(10)
    assert not [t for t in threading.enumerate() if t.name == "tensorhub-install" and t.is_alive()]


def test_nothing_to_copy_is_done_at_once() -> None:
    live, staged = staged_for({"empty": np.zeros((0, 4))})
    outcome = LocalCopy(list_copies(live, staged), Observer(), threads=4).wait(10)
    assert outcome is not None
    assert outcome.end is ReadEnd.VERIFIED
    assert isinstance(list_copies(live, staged), CopyList)
    assert copy_threads() >= 1


def test_storages_with_bytes_outside_of_every_box_are_known() -> None:
    whole, part, tied = np.zeros((4, 4)), np.zeros((6, 4)), np.zeros((3, 3))
    boxes = {
        "a whole": [Box("w", (0, 0), (2, 4), (0, 0)), Box("w", (2, 0), (2, 4), (2, 0))],
        "b part": [Box("v", (0, 0), (4, 4), (1, 0))],
        "c tied": [Box("u", (0, 0), (2, 3), (0, 0))],
    }
    live = RegisteredMemory({"a whole": whole, "b part": part, "c tied": tied, "d tied": tied, "e": np.ones(3)}, boxes)
    assert [live.storages[k].names for k in padded_storages(live.layout)] == [("b part",)]
    part[:] = 5.0
    staged = StagedMemory(live, Arena(storage_lengths(live)))
    staged.collect()
    buffer = staged.buffers[1]
    assert buffer is not None
    assert (buffer.view(np.float64) == 5.0).all()


def test_padding_of_a_strided_tensor_is_taken_over_in_its_dense_form() -> None:
    tensor = torch.arange(24.0).reshape(4, 6).t()
    live = RegisteredMemory({"p": tensor}, {"p": [Box("w", (0, 0), (5, 4), (0, 0))]})
    staged = StagedMemory(live, Arena(storage_lengths(live)))
    staged.collect()
    assert staged.buffers[0] is not None
    assert staged.buffers[0].tobytes() == tensor.contiguous().numpy().tobytes()
