"""Copy boxes out of a staged source segment into destination memory: bytes as they are, or numbers of another dtype."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.convert import STORED, convert_into

_ITEM_TYPES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype("V16"),
}


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy one box from a source segment to a destination storage, all in elements.

    `dst_start` [destination axes] is in the destination storage's tensor, `src_start` [source axes] in the segment's
    own box. `shape` has the longer of the two ranks; the shorter one is aligned at the last axis, as in numpy.
    """

    storage: int
    dst_start: tuple[int, ...]
    src_start: tuple[int, ...]
    shape: tuple[int, ...]


def scatter_bytes(
    segment: NDArray[np.uint8],
    segment_shape: tuple[int, ...],
    scatter: Scatter,
    destination: NDArray[np.uint8],
    destination_shape: tuple[int, ...],
    item_bytes: int,
) -> None:
    """Copy one scatter's box from a segment's bytes to a storage's bytes; nothing else of the destination changes.

    `segment` u8 [segment bytes] is the box `segment_shape` in C order; `destination` u8 [storage bytes] is the tensor
    `destination_shape` in C order. Raises ValueError if sizes do not fit. Any thread.
    """
    target = _target(destination, destination_shape, scatter, _ITEM_TYPES[item_bytes])
    target[...] = _source(segment, segment_shape, scatter, _ITEM_TYPES[item_bytes])


def scatter_cast(
    segment: NDArray[np.uint8],
    segment_shape: tuple[int, ...],
    scatter: Scatter,
    destination: NDArray[np.uint8],
    destination_shape: tuple[int, ...],
    dtypes: tuple[str, str],
) -> None:
    """Copy one scatter's box as `scatter_bytes` does, its numbers converted from the first of two dtypes to the other.

    Raises ValueError if sizes do not fit. Any thread.
    """
    source_dtype, dtype = dtypes
    target = _target(destination, destination_shape, scatter, STORED[dtype])
    convert_into(_source(segment, segment_shape, scatter, STORED[source_dtype]), source_dtype, target, dtype)


def cast_box(
    segment: NDArray[np.uint8], segment_shape: tuple[int, ...], scatter: Scatter, dtypes: tuple[str, str]
) -> tuple[NDArray[np.uint8], Scatter]:
    """Return a scatter's box in another dtype, as a segment of its own (u8), and the scatter out of that."""
    source_dtype, dtype = dtypes
    box = np.empty(scatter.shape, STORED[dtype])
    convert_into(_source(segment, segment_shape, scatter, STORED[source_dtype]), source_dtype, box, dtype)
    start = (0,) * len(scatter.shape)
    return box.reshape(-1).view(np.uint8), Scatter(scatter.storage, scatter.dst_start, start, scatter.shape)


def _source(segment: NDArray[np.uint8], shape: tuple[int, ...], scatter: Scatter, item: np.dtype[Any]) -> NDArray[Any]:
    return _box_of(segment.view(item).reshape(shape), scatter.src_start, scatter.shape, len(scatter.shape))


def _target(
    destination: NDArray[np.uint8], shape: tuple[int, ...], scatter: Scatter, item: np.dtype[Any]
) -> NDArray[Any]:
    if not destination.flags.c_contiguous:
        raise ValueError("the destination is not one run of bytes")
    return _box_of(destination.view(item).reshape(shape), scatter.dst_start, scatter.shape, len(scatter.shape))


def _box_of(array: NDArray[Any], start: tuple[int, ...], shape: tuple[int, ...], rank: int) -> NDArray[Any]:
    lead = rank - array.ndim
    aligned = array.reshape((1,) * lead + array.shape)
    starts = (0,) * lead + start
    # The ellipsis keeps a 0-dim box an array.
    place: tuple[slice | EllipsisType, ...] = (
        ...,
        *(slice(at, at + size) for at, size in zip(starts, shape, strict=True)),
    )
    box = aligned[place]
    if box.shape != shape:
        raise ValueError(f"box {start} + {shape} does not lie in an array of shape {array.shape}")
    return box
