"""Runs lie inside registered memory or they do not; whole numbers of Python are the truth."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Region
from tensorhub_core.transport.extents import Extents, pack_regions

TOP = 2**64


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def inside(regions: list[Region], address: int, length: int) -> bool:
    """Extents join no regions: a run lies in one of them, or in the reach of one that begins before it."""
    begun = [r for r in regions if r.address <= address]
    return bool(begun) and address + length <= max(r.address + r.length_bytes for r in begun)


@pytest.mark.parametrize("seed", range(40))
def test_against_whole_numbers(seed: int) -> None:
    chance = np.random.default_rng(seed)
    regions = [Region(int(a), int(n)) for a, n in zip(chance.integers(1, 200, 6), chance.integers(1, 60, 6))]  # noqa: B905
    for extents in (Extents(regions), Extents.unpack(pack_regions(regions))):
        for address in range(1, 270, 3):
            for length in (0, 1, 7, 50):
                assert extents.cover(u64(address), u64(length), "cpu") == inside(regions, address, length)


def test_one_run_outside_is_enough() -> None:
    extents = Extents([Region(100, 50), Region(1000, 10)])
    assert extents.cover(u64(100, 1000, 149), u64(50, 10, 1), "cpu")
    assert not extents.cover(u64(100, 1000, 149), u64(50, 10, 2), "cpu")
    assert not extents.cover(u64(99, 1000), u64(1, 1), "cpu")


def test_a_run_that_wraps_around_is_outside() -> None:
    top = Extents([Region(TOP - 4096, 4000), Region(1, 10)])
    assert top.cover(u64(TOP - 4096), u64(4000), "cpu")
    for length in (4096, 4097, 4105, TOP - 1):
        assert not top.cover(u64(TOP - 4096), u64(length), "cpu")
    assert not top.cover(u64(TOP - 1), u64(2), "cpu")


def test_devices_are_apart() -> None:
    extents = Extents([Region(100, 50), Region(100, 90, "cuda:0")])
    assert extents.cover(u64(100), u64(90), "cuda:0")
    assert not extents.cover(u64(100), u64(90), "cpu")
    assert not extents.cover(u64(100), u64(1), "cuda:1")
    assert not Extents([]).cover(u64(100), u64(0), "cpu")


@pytest.mark.parametrize(
    "packed", [b"x", bytes(15), pack_regions([Region(0, 5)]), np.array([[TOP - 5, 6]], "<u8").tobytes()]
)
def test_regions_that_cannot_be_are_refused(packed: bytes) -> None:
    with pytest.raises(TransportError):
        Extents.unpack(packed)
