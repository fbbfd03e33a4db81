"""One system call for many runs: short counts, errors, and where it cannot be had."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport import process_memory
from tensorhub_core.transport.process_memory import MOST_RUNS, ProcessMemory, address_of, iovecs


def runs_of(array: np.ndarray, lengths: list[int]) -> np.ndarray:
    ends = np.cumsum(lengths)
    rows = np.empty((len(lengths), 2), np.uint64)
    rows[:, 0], rows[:, 1] = address_of(array) + ends - lengths, lengths
    return rows


class Reluctant:
    """A kernel that copies some bytes of what is asked for, at least one, and says how many."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.calls = 0

    def __call__(self, pid: int, here: int, count: int, there: int, far: int, flags: int) -> int:
        assert count == far <= MOST_RUNS
        self.calls += 1
        both = [(ctypes.c_uint64 * (2 * count)).from_address(place) for place in (here, there)]
        left = copied = self._chance.randint(1, max(1, sum(both[1][1::2]) // 3))
        for at in range(0, 2 * count, 2):
            assert both[0][at + 1] == both[1][at + 1]
            size = min(left, both[1][at + 1])
            ctypes.memmove(both[0][at], both[1][at], size)
            left -= size
        return copied


@pytest.mark.parametrize("seed", range(60))
def test_short_counts_are_gone_on_with(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(seed)
    lengths = chance.integers(0, 40, int(chance.integers(1, 20))).tolist()
    lengths.append(16)
    truth = chance.integers(0, 256, sum(lengths) + 8, np.uint8)
    copy = np.full_like(truth, 0xA5)
    memory, kernel = ProcessMemory(), Reluctant(seed)
    monkeypatch.setattr(memory, "_readv", kernel)
    assert memory.read(1, runs_of(copy, lengths), runs_of(truth, lengths)) == 0
    assert np.array_equal(copy[:-8], truth[:-8])
    assert (copy[-8:] == 0xA5).all()
    assert kernel.calls >= 3


def test_as_many_runs_as_the_kernel_takes() -> None:
    assert os.sysconf("SC_IOV_MAX") == MOST_RUNS
    truth = np.random.default_rng(0).integers(0, 256, 3 * MOST_RUNS, np.uint8)
    copy, lengths = np.zeros_like(truth), [3] * MOST_RUNS
    assert ProcessMemory().read(os.getpid(), runs_of(copy, lengths), runs_of(truth, lengths)) == 0
    assert np.array_equal(copy, truth)


def test_errors_are_the_kernels() -> None:
    memory, one = ProcessMemory(), np.zeros(16, np.uint8)
    assert memory.read(2**22 + 5, iovecs(1, one), iovecs(1, one)) == errno.ESRCH
    nowhere = iovecs(1, one)
    nowhere[0, 0] = 16
    assert memory.read(os.getpid(), iovecs(1, one), nowhere) == errno.EFAULT
    assert memory.read(os.getpid(), nowhere.copy(), iovecs(1, one)) == errno.EFAULT


def test_a_kernel_that_copies_nothing_does_not_hold_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, one = ProcessMemory(), np.zeros(16, np.uint8)
    monkeypatch.setattr(memory, "_readv", lambda *arguments: 0)
    assert memory.read(1, iovecs(1, one), iovecs(1, one)) == errno.EFAULT


@pytest.mark.parametrize(("scope", "asked"), [("1\n", True), ("0\n", False), ("2", False), ("3", False), (None, False)])
def test_yama_is_asked_only_where_it_would_refuse(scope: str | None, asked: bool, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    memory = ProcessMemory()
    memory._libc = SimpleNamespace(prctl=lambda *arguments: calls.append(arguments))  # type: ignore[assignment]
    if scope is not None:
        (tmp_path / "scope").write_text(scope)
    memory.allow_neighbours(tmp_path / "scope")
    assert len(calls) == asked
    for call in calls:
        assert (call[0], call[1].value) == (int.from_bytes(b"Yama", "big"), 2**64 - 1)


def test_where_it_cannot_be_had_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(TransportError, match="Linux"):
            ProcessMemory()
    with monkeypatch.context() as patch:
        patch.setattr(process_memory.ctypes, "CDLL", lambda *a, **k: SimpleNamespace())
        with pytest.raises(TransportError, match="no process_vm_readv"):
            ProcessMemory()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessMemory, "read", lambda *arguments: errno.EPERM)
        with pytest.raises(TransportError, match=r"not permitted.*seccomp"):
            ProcessMemory()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessMemory, "read", lambda *arguments: 0)
        with pytest.raises(TransportError, match="wrong bytes"):
            ProcessMemory()
