"""Runs of memory, sent or filled from the front in parts, are the bytes that numpy says they are."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.tcp_memory import Vector, merge, sound

RUNS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=30)
"""(gap, length) of each run."""


def laid_out(runs: list[tuple[int, int]], base: int) -> tuple[np.ndarray, np.ndarray]:
    gaps, lengths = np.array(runs, np.uint64).T
    return np.cumsum(gaps + lengths) - lengths + np.uint64(base), lengths.copy()


@given(runs=RUNS, bounds=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), min_size=1), head=st.binary())
def test_a_vector_gives_every_byte_once_in_order_within_its_bounds(
    runs: list[tuple[int, int]], bounds: list[tuple[int, int]], head: bytes
) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 1500, np.uint8)
    addresses, lengths = laid_out(runs, memory.ctypes.data)
    vector = Vector()
    if head:
        vector.add_bytes(head)
    half = len(lengths) // 2
    for part in (slice(0, half), slice(half, None)):
        vector.add_runs(addresses[part], lengths[part])
    begins = (addresses - np.uint64(memory.ctypes.data)).tolist()
    expected = head + b"".join(memory[a : a + n].tobytes() for a, n in zip(begins, lengths.tolist(), strict=True))
    assert vector.total_bytes == len(expected)
    got, step = b"", 0
    while vector.left_bytes:
        most_bytes, most_runs = bounds[step % len(bounds)]
        runs = vector.front(most_bytes, most_runs)
        assert 0 < len(runs) <= most_runs
        offered = b"".join(ctypes.string_at(*run) for run in runs.tolist())
        assert 0 < len(offered) <= most_bytes
        taken = 1 + step % len(offered)
        got += offered[:taken]
        vector.advance(taken)
        step += 1
    assert got == expected
    assert vector.front(10).shape == (0, 2)


@given(runs=RUNS)
def test_a_vector_is_filled_in_place(runs: list[tuple[int, int]]) -> None:
    memory = np.zeros(1500, np.uint8)
    addresses, lengths = laid_out(runs, memory.ctypes.data)
    expected, value = memory.copy(), 1
    vector = Vector()
    vector.add_runs(addresses, lengths)
    for begin, length in zip((addresses - np.uint64(memory.ctypes.data)).tolist(), lengths.tolist(), strict=True):
        for at in range(begin, begin + length):
            expected[at] = value % 251
            value += 1
    value = 1
    while vector.left_bytes:
        address, length = vector.front(7)[0].tolist()
        assert 0 < length <= 7
        ctypes.memset(address, value % 251, 1)
        vector.advance(1)
        value += 1
    assert np.array_equal(memory, expected)


def test_neighbours_are_joined_and_empty_runs_left_out() -> None:
    addresses = np.array([10, 14, 14, 20, 40, 30], np.uint64)
    lengths = np.array([4, 0, 6, 5, 1, 10], np.uint64)
    found = merge(addresses, lengths)
    assert [part.tolist() for part in found] == [[10, 40, 30], [15, 1, 10]]
    vector = Vector()
    vector.add_runs(addresses[1:2], lengths[1:2])
    assert (vector.total_bytes, len(vector)) == (0, 0)


@pytest.mark.parametrize("wrong", [Region(0, 1), Region(8, -1), Region(1 << 62, 1), Region(8, 8, "cuda:0")])
def test_what_sockets_cannot_reach_is_no_region(wrong: Region) -> None:
    with pytest.raises(TransportError):
        sound([Region(8, 8), wrong])
    assert sound([Region(8, 8), Region(0, 0)]) == [Region(8, 8)]
