"""Scatters copy bytes of every item size and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.layout.scatter import Scatter, scatter_bytes


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_box_is_copied_and_nothing_else(item_bytes: int, shift: int) -> None:
    """`shift` makes the buffers unaligned, as slices of a larger allocation may be."""
    rng = np.random.default_rng(item_bytes)
    segment = rng.integers(0, 256, 4 * 5 * item_bytes + shift, np.uint8)[shift:]
    destination = np.full(3 * 6 * 7 * item_bytes + shift, 0xA5, np.uint8)[shift:]
    scatter_bytes(segment, (4, 5), Scatter(0, (1, 2, 3), (1, 2), (1, 3, 2)), destination, (3, 6, 7), item_bytes)
    wanted = np.full((3, 6, 7, item_bytes), 0xA5, np.uint8)
    wanted[1, 2:5, 3:5] = segment.reshape(4, 5, item_bytes)[1:4, 2:4]
    assert np.array_equal(destination, wanted.reshape(-1))


def test_a_scalar_is_copied() -> None:
    destination = np.zeros(8, np.uint8)
    scatter_bytes(np.arange(8, dtype=np.uint8), (), Scatter(0, (), (), ()), destination, (), 8)
    assert destination.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("scatter", "segment", "shape", "destination"),
    [
        (Scatter(0, (5,), (0,), (2,)), 4, (4,), np.zeros(6, np.uint8)),
        (Scatter(0, (0,), (3,), (2,)), 4, (4,), np.zeros(6, np.uint8)),
        (Scatter(0, (0,), (0,), (2,)), 4, (5,), np.zeros(6, np.uint8)),
        (Scatter(0, (0,), (0,), (2,)), 4, (4,), np.zeros(5, np.uint8)),
        (Scatter(0, (0,), (0,), (2,)), 4, (4,), np.zeros(12, np.uint8)[::2]),
    ],
)
def test_what_does_not_fit_is_refused(
    scatter: Scatter, segment: int, shape: tuple[int, ...], destination: np.ndarray
) -> None:
    with pytest.raises(ValueError, match=r"box|reshape|run"):
        scatter_bytes(np.ones(segment, np.uint8), shape, scatter, destination, (6,), 1)
    assert not destination.any()
