"""Overlap decisions against brute force over all byte addresses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.client.overlap import Extent, overlapping_pairs, overlaps_itself


def addresses(extent: Extent) -> list[int]:
    """List the address of every byte of every element, repeated ones too."""
    return [
        extent.address + sum(i * s for i, s in zip(index, extent.strides, strict=True)) + byte
        for index in itertools.product(*(range(size) for size in extent.shape))
        for byte in range(extent.item_bytes)
    ]


@st.composite
def extents(draw: st.DrawFn, base: int = 1 << 20, spread: int = 0) -> Extent:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank)))
    strides = tuple(draw(st.lists(st.integers(-12, 24), min_size=rank, max_size=rank)))
    return Extent(base + draw(st.integers(0, spread)), shape, strides, draw(st.sampled_from([1, 2, 4])))


@given(extents())
@settings(max_examples=400, deadline=None)
def test_self_overlap_is_what_brute_force_says(extent: Extent) -> None:
    all_bytes = addresses(extent)
    assert overlaps_itself(extent) == (len(set(all_bytes)) != len(all_bytes))


@given(st.lists(extents(spread=64).filter(lambda e: not overlaps_itself(e)), min_size=2, max_size=5))
@settings(max_examples=200, deadline=None)
def test_pairs_are_what_brute_force_says(found: list[Extent]) -> None:
    sets = [set(addresses(extent)) for extent in found]
    expected = {(a, b) for a, b in itertools.combinations(range(len(found)), 2) if sets[a] & sets[b]}
    assert {tuple(sorted(pair)) for pair in overlapping_pairs(found)} == expected


@given(extents())
@settings(max_examples=200, deadline=None)
def test_hull_and_length_are_what_brute_force_says(extent: Extent) -> None:
    all_bytes = addresses(extent)
    assert extent.length_bytes == len(all_bytes)
    assert extent.hull() == ((min(all_bytes), max(all_bytes) + 1) if all_bytes else (extent.address,) * 2)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 3, 1), (0, 5), (4, 0), (2, 1, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_contiguous_agrees_with_numpy(shape: tuple[int, ...], order: str) -> None:
    array = np.zeros(shape, np.float32, order=order)  # type: ignore[call-overload]
    extent = Extent(array.__array_interface__["data"][0], array.shape, array.strides, 4)
    assert extent.contiguous == array.flags.c_contiguous
