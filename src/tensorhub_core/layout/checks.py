"""Check a layout from anyone against everything that planning and copying rely on, in bounded work."""

from __future__ import annotations

from itertools import combinations
from math import prod

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import RegistrationError
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.regions import Region, align, intersect
from tensorhub_core.layout.segments import grid_of
from tensorhub_core.layout.types import Box, Layout, TensorSpec

MAX_RANK = 32
MAX_SHARDS = 1 << 20
MAX_TENSORS = 1 << 19
MAX_BOXES = 1 << 18
MAX_SEGMENTS = 1 << 22
MAX_NAME_BYTES = 64 << 10
MAX_BYTES = 1 << 62
MIN_SEGMENT_BYTES = 16
MAX_SEGMENT_BYTES = 1 << 30
MAX_PAIRS = 1 << 24
"""Pairs of boxes of all tensors together that may have to be compared to prove that boxes do not overlap."""

_FEW_BOXES = 8
_PAIRS_AT_ONCE = 1 << 18

_Ints = NDArray[np.int64]


def quote(name: str) -> str:
    """Write a name into a message: unambiguous, and not longer than a line or two."""
    return repr(name) if len(name) <= 200 else f"{name[:120]!r}...{name[-60:]!r} ({len(name)} characters)"


def check_name(name: str, what: str) -> None:
    """Raise RegistrationError unless the name is non-empty, encodable and bounded."""
    if not name:
        raise RegistrationError(f"{what} has an empty name")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        text = f"{what} has a name that is not unicode text: {name[:200]!r} ({error.reason})"
        raise RegistrationError(text) from None
    if size > MAX_NAME_BYTES:
        raise RegistrationError(f"{what} has a name of {size:,} bytes; the limit is {MAX_NAME_BYTES:,}")


def check_layout(layout: Layout) -> None:
    """Raise RegistrationError naming the first thing in which the layout is not canonical, or not possible."""
    _check_head(layout)
    pairs_left = MAX_PAIRS
    boxes_left = MAX_BOXES
    previous = ""
    for position, spec in enumerate(layout.tensors):
        check_name(spec.name, f"tensor {position}")
        if spec.name <= previous:
            raise RegistrationError(f"{quote(spec.name)} is twice in the layout, or not in the order of names")
        previous = spec.name
        _check_shape(spec)
        if spec.boxes is not None:
            boxes_left -= len(spec.boxes)
            if boxes_left < 0:
                raise RegistrationError(f"the layout has more than {MAX_BOXES:,} boxes")
            pairs_left = _check_boxes(spec, spec.boxes, pairs_left)
    _check_storages(layout)
    _check_sizes(layout)


def _check_head(layout: Layout) -> None:
    if not 0 <= layout.shard < layout.num_shards <= MAX_SHARDS:
        raise RegistrationError(f"shard {layout.shard} of {layout.num_shards} does not exist")
    if not MIN_SEGMENT_BYTES <= layout.segment_bytes <= MAX_SEGMENT_BYTES:
        raise RegistrationError(
            f"segment_bytes is {layout.segment_bytes}, not between {MIN_SEGMENT_BYTES} and {MAX_SEGMENT_BYTES:,}"
        )
    if len(layout.tensors) > MAX_TENSORS:
        raise RegistrationError(f"the layout has {len(layout.tensors):,} tensors; the limit is {MAX_TENSORS:,}")
    if layout.tag:
        check_name(layout.tag, "the layout's tag")


def _check_shape(spec: TensorSpec) -> None:
    if len(spec.shape) > MAX_RANK:
        raise RegistrationError(f"{quote(spec.name)} has {len(spec.shape)} axes; the limit is {MAX_RANK}")
    # The product is bounded before it is used, and zero-sized tensors cannot hide a huge axis from it.
    size = _item_bytes(spec)
    for length in spec.shape:
        if length < 0:
            raise RegistrationError(f"{quote(spec.name)} has a negative size: shape {spec.shape}")
        size *= max(length, 1)
        if size > MAX_BYTES:
            raise RegistrationError(f"{quote(spec.name)} of shape {spec.shape} is larger than any memory")


def _item_bytes(spec: TensorSpec) -> int:
    """Return the element size of a tensor; raises RegistrationError naming it."""
    try:
        return dtype_bytes(spec.dtype)
    except RegistrationError as error:
        raise RegistrationError(f"{quote(spec.name)}: {error}") from None


def _check_boxes(spec: TensorSpec, boxes: tuple[Box, ...], pairs_left: int) -> int:
    """Check the boxes of one tensor and return how many pairs of boxes may still be compared."""
    regions: list[Region] = []
    for position, box in enumerate(boxes):
        what = f"box {position} of {quote(spec.name)}"
        check_name(box.logical, what)
        rank = len(spec.shape)
        if len(box.offset) != len(box.shape) or len(box.shape) > MAX_RANK or len(box.local_offset) != rank:
            raise RegistrationError(f"{what} has offset, shape and local_offset of ranks that do not fit: {box}")
        if min((*box.offset, *box.shape, *box.local_offset), default=0) < 0:
            raise RegistrationError(f"{what} has a negative number: {box}")
        if any(at + length > MAX_BYTES for at, length in zip(box.offset, box.shape, strict=True)):
            raise RegistrationError(f"{what} is larger than any memory: {box}")
        lead = box.shape[: max(0, len(box.shape) - rank)]
        local = align(box.shape, rank, 1)
        end = tuple(at + length for at, length in zip(box.local_offset, local, strict=True))
        if any(length > 1 for length in lead) or any(at > full for at, full in zip(end, spec.shape, strict=True)):
            raise RegistrationError(f"{what} does not lie inside the tensor of shape {spec.shape}: {box}")
        if 0 not in box.shape:
            regions.append((box.local_offset, end))
    return _check_disjoint(spec, regions, pairs_left)


def _check_disjoint(spec: TensorSpec, regions: list[Region], pairs_left: int) -> int:
    if len(regions) < 2:
        return pairs_left
    if len(regions) <= _FEW_BOXES:
        for one, other in combinations(regions, 2):
            if intersect(one, other):
                raise _overlap(spec, one, other)
        return pairs_left
    lo = np.array([region[0] for region in regions], np.int64)
    hi = np.array([region[1] for region in regions], np.int64)
    if not lo.shape[1]:
        raise _overlap(spec, regions[0], regions[1])
    # Sweep along the axis on which the fewest boxes share coordinates.
    best: tuple[int, _Ints, _Ints] | None = None
    for axis in range(lo.shape[1]):
        order = np.argsort(lo[:, axis], kind="stable")
        later = np.searchsorted(lo[order, axis], hi[order, axis], "left") - np.arange(1, len(order) + 1)
        if best is None or later.sum() < best[0]:
            best = int(later.sum()), order, later
    assert best is not None
    pairs, order, later = best
    if pairs > pairs_left:
        raise RegistrationError(f"{quote(spec.name)} is cut into too many small boxes ({len(regions):,}) to be checked")
    _compare_pairs(spec, regions, lo[order], hi[order], order, later)
    return pairs_left - pairs


def _compare_pairs(spec: TensorSpec, regions: list[Region], lo: _Ints, hi: _Ints, order: _Ints, later: _Ints) -> None:
    ends = np.cumsum(later)
    for begin in range(0, int(ends[-1]), _PAIRS_AT_ONCE):
        pair = np.arange(begin, min(begin + _PAIRS_AT_ONCE, int(ends[-1])))
        one = np.searchsorted(ends, pair, "right")
        other = one + 1 + pair - (ends[one] - later[one])
        hit = ((lo[one] < hi[other]) & (lo[other] < hi[one])).all(axis=1)
        if hit.any():
            at = int(hit.argmax())
            raise _overlap(spec, regions[int(order[one[at]])], regions[int(order[other[at]])])


def _overlap(spec: TensorSpec, one: Region, other: Region) -> RegistrationError:
    return RegistrationError(
        f"two boxes of {quote(spec.name)} overlap in the tensor: {one[0]} to {one[1]}, and {other[0]} to {other[1]}"
    )


def _check_storages(layout: Layout) -> None:
    tensors = layout.tensors
    seen = bytearray(len(tensors))
    last_first = -1
    for group in layout.storages:
        if not group or group[0] <= last_first:
            raise RegistrationError("a storage is empty, or the storages are not in the order of their first tensors")
        last_first = group[0]
        previous = -1
        for index in group:
            if not previous < index < len(tensors) or seen[index]:
                raise RegistrationError(f"tensor {index} does not exist, or is in two storages, or out of order")
            seen[index] = 1
            previous = index
            one, other = tensors[group[0]], tensors[index]
            if one.dtype != other.dtype or one.shape != other.shape:
                raise RegistrationError(
                    f"{quote(one.name)} ({one.dtype}, {one.shape}) and {quote(other.name)} ({other.dtype}, "
                    f"{other.shape}) share bytes but differ in dtype or shape: register one of them"
                )
    if 0 in seen:
        raise RegistrationError(f"{quote(tensors[seen.index(0)].name)} has no storage")


def _check_sizes(layout: Layout) -> None:
    total = segments = 0
    for group in layout.storages:
        spec = layout.tensors[group[0]]
        item = dtype_bytes(spec.dtype)
        size = prod(spec.shape) * item
        total += size
        segments += 1 if 0 < size <= layout.segment_bytes else grid_of(spec.shape, item, layout.segment_bytes).segments
        if segments > MAX_SEGMENTS or total > MAX_BYTES:
            raise RegistrationError(
                f"the tensors make more than {MAX_SEGMENTS:,} segments of {layout.segment_bytes:,} bytes: "
                "use larger segments or more shards"
            )


__all__ = ["MAX_SEGMENTS", "check_layout", "check_name", "quote"]
