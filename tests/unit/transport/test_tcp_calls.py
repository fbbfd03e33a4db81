"""Runs sent and received by one system call are the bytes that lie there, and what the kernel refuses is an OSError."""

from __future__ import annotations

import errno
import mmap
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from tensorhub_core.transport.tcp_calls import VectoredCalls

RUNS = 300


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def scattered(memory: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return iovecs u64 [runs, 2] all over a memory, and the index of every byte they name, in order."""
    lengths = np.random.default_rng(seed).integers(1, 60, RUNS)
    begins = np.random.default_rng(0).permutation(RUNS) * 64
    runs = np.stack([begins + memory.ctypes.data, lengths], axis=1).astype(np.uint64)
    return runs, np.concatenate([np.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)])


def test_runs_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    source, sink = np.random.default_rng(5).integers(1, 256, RUNS * 64, np.uint8), np.zeros(RUNS * 64, np.uint8)
    (there, sent), (here, _) = scattered(source, 1), scattered(sink, 1)
    calls = VectoredCalls()
    assert calls.send(pair[0].fileno(), there) == len(sent)
    assert calls.receive(pair[1].fileno(), here) == len(sent)
    expected = np.zeros_like(sink)
    expected[sent] = source[sent]
    assert np.array_equal(sink, expected)


def test_runs_cut_otherwise_on_the_other_side_are_the_same_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    source, sink = np.random.default_rng(6).integers(1, 256, RUNS * 64, np.uint8), np.zeros(RUNS * 64, np.uint8)
    (there, sent), (here, received) = scattered(source, 1), scattered(sink, 2)
    calls = VectoredCalls()
    count = calls.receive(pair[1].fileno(), here) if calls.send(pair[0].fileno(), there) else 0
    assert count == min(len(sent), len(received))
    assert np.array_equal(sink[received[:count]], source[sent[:count]])
    assert np.count_nonzero(sink) == count


def test_nothing_there_and_the_end_can_be_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    memory = np.zeros(8, np.uint8)
    runs = np.array([[memory.ctypes.data, 8]], np.uint64)
    calls = VectoredCalls()
    with pytest.raises(BlockingIOError):
        calls.receive(pair[1].fileno(), runs)
    pair[0].close()
    assert calls.receive(pair[1].fileno(), runs, wait=True) == 0
    with pytest.raises(BrokenPipeError):
        calls.send(pair[1].fileno(), runs)


def test_memory_that_is_not_there_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(page, np.uint8).ctypes.data
    page.close()  # the view is gone already
    runs = np.array([[address, 8]], np.uint64)
    with pytest.raises(OSError, match="address") as caught:
        VectoredCalls().send(pair[0].fileno(), runs)
    assert caught.value.errno == errno.EFAULT
