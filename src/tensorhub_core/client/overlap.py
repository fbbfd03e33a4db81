"""Decide on byte ranges alone whether strided tensors are contiguous, overlap themselves, or overlap each other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAX_WORK = 1_000_000
"""Bound of the exact overlap search; a geometry that needs more is taken for overlapping."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's elements lie: `shape` in elements, `strides` in bytes, `address` that of its first element."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def length_bytes(self) -> int:
        """Return the bytes of all elements, without gaps."""
        count = self.item_bytes
        for size in self.shape:
            count *= size
        return count

    @property
    def contiguous(self) -> bool:
        """Tell whether the elements lie in C order without gaps; strides of axes of one element do not matter."""
        if 0 in self.shape:
            return True
        expected = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def hull(self) -> tuple[int, int]:
        """Return the lowest address of any byte and the one behind the highest; equal for an empty tensor."""
        if 0 in self.shape:
            return self.address, self.address
        low = high = self.address
        for size, stride in zip(self.shape, self.strides, strict=True):
            reach = (size - 1) * stride
            low, high = (low + reach, high) if reach < 0 else (low, high + reach)
        return low, high + self.item_bytes


def overlaps_itself(extent: Extent) -> bool:
    """Tell whether two elements share a byte (`expand()` makes such tensors)."""
    axes = [(abs(stride), size) for stride, size in zip(extent.strides, extent.shape, strict=True) if size != 1]
    if any(size == 0 for _, size in axes):
        return False
    reach = extent.item_bytes
    for stride, size in sorted(axes):
        if stride == 0:
            return True
        if stride < reach:
            return _overlaps_itself_exactly(extent)
        reach += (size - 1) * stride
    return False


def _overlaps_itself_exactly(extent: Extent) -> bool:
    # Two elements that meet differ first along some axis; by translation one of them may be taken at its index 0 there.
    array = _geometry(extent)
    while array.ndim:
        if array.shape[0] > 1 and _share(array[:1], array[1:]):
            return True
        array = array[0, ...]  # the dots keep it a view: a scalar would be read from memory
    return False


def overlapping_pairs(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Yield the index pairs of extents that share a byte; interleaved ones (columns of one matrix) do not."""
    hulls = [extent.hull() for extent in extents]
    open_ones: list[int] = []
    for index in sorted(range(len(extents)), key=hulls.__getitem__):
        low, high = hulls[index]
        if low == high:
            continue
        open_ones = [other for other in open_ones if hulls[other][1] > low]
        for other in open_ones:
            both_dense = extents[index].contiguous and extents[other].contiguous
            if both_dense or _share(_geometry(extents[index]), _geometry(extents[other])):
                yield (other, index)
        open_ones.append(index)


def _share(a: NDArray[np.void], b: NDArray[np.void]) -> bool:
    try:
        return np.shares_memory(a, b, max_work=_MAX_WORK)  # type: ignore[arg-type]  # the stubs know only -1 and 0
    except np.exceptions.TooHardError:
        return True


def _geometry(extent: Extent) -> NDArray[np.void]:
    """Return an array with the extent's addresses, for numpy's overlap solver; its memory is never touched."""
    low, high = extent.hull()
    memory = memoryview((ctypes.c_uint8 * (high - low)).from_address(low))
    dtype = np.dtype(f"V{extent.item_bytes}")
    return np.ndarray(extent.shape, dtype, memory, extent.address - low, extent.strides)
