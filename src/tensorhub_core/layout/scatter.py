"""Copy boxes out of a staged source segment into destination memory, without interpreting the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray

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
    if not destination.flags.c_contiguous:
        raise ValueError("the destination is not one run of bytes")
    item = _ITEM_TYPES[item_bytes]
    source = segment.view(item).reshape(segment_shape)
    target = destination.view(item).reshape(destination_shape)
    rank = len(scatter.shape)
    from_box = _box_of(source, scatter.src_start, scatter.shape, rank)
    into_box = _box_of(target, scatter.dst_start, scatter.shape, rank)
    into_box[...] = from_box


def _box_of(
    array: NDArray[np.generic], start: tuple[int, ...], shape: tuple[int, ...], rank: int
) -> NDArray[np.generic]:
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
