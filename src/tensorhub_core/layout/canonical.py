"""Build, encode and check layouts, so that equal sets of tensors have equal bytes and hostile bytes are refused."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

import msgspec
import xxhash

from tensorhub_core.errors import LayoutMismatch, RegistrationError
from tensorhub_core.ids import Digest
from tensorhub_core.layout.checks import check_layout, check_name, quote
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.types import IDENTITY_TAG, Box, Checksum, Layout, TensorSpec

SEGMENT_BYTES = 4 << 20
MAX_LAYOUT_BYTES = (64 << 20) - 4096
"""A layout travels in one message; messages are bounded by 64 MiB."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Layout] = msgspec.msgpack.Decoder(Layout)


def digest_of(data: bytes) -> Digest:
    """Return the content address of a blob."""
    return Digest(xxhash.xxh3_128_digest(data))


def build_layout(
    specs: Iterable[TensorSpec],
    aliases: Iterable[Iterable[str]] = (),
    *,
    shard: int,
    num_shards: int,
    tag: str = IDENTITY_TAG,
    segment_bytes: int = SEGMENT_BYTES,
    checksum: Checksum = "xxh3",
) -> Layout:
    """Build the canonical layout of tensors given in any order.

    Each group of `aliases` names tensors that share exactly the same bytes (and so have one dtype and shape). Raises
    RegistrationError naming the tensor that cannot be described. Any thread.
    """
    named: dict[str, TensorSpec] = {}
    for position, spec in enumerate(specs):
        check_name(spec.name, f"tensor {position}")
        if spec.name in named:
            raise RegistrationError(f"{quote(spec.name)} is registered twice; the second time at position {position}")
        try:
            named[spec.name] = _plain_numbers(spec)
        except TypeError as error:
            raise RegistrationError(f"{quote(spec.name)} needs whole numbers in shape and boxes: {error}") from None
    tensors = tuple(named[name] for name in sorted(named))
    layout = Layout(shard, num_shards, tensors, _storages(tensors, aliases), tag, segment_bytes, checksum)
    check_layout(layout)
    return layout


def _plain_numbers(spec: TensorSpec) -> TensorSpec:
    """Replace sizes of other integer types (torch.Size, numpy integers) by what msgpack can encode."""
    boxes = spec.boxes
    if boxes is not None:
        boxes = tuple(Box(box.logical, _ints(box.offset), _ints(box.shape), _ints(box.local_offset)) for box in boxes)
    return TensorSpec(spec.name, spec.dtype, _ints(spec.shape), boxes)


def _ints(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(index, numbers))


def _storages(tensors: tuple[TensorSpec, ...], aliases: Iterable[Iterable[str]]) -> tuple[tuple[int, ...], ...]:
    """Merge alias groups that have a name in common, and sort."""
    number = {spec.name: position for position, spec in enumerate(tensors)}
    groups: dict[int, list[int]] = {position: [position] for position in range(len(tensors))}
    for names in aliases:
        merged: list[int] | None = None
        for name in names:
            if name not in number:
                raise RegistrationError(f"the alias {quote(name)} is not among the registered tensors")
            group = groups[number[name]]
            if merged is None or merged is group:
                merged = group
                continue
            small, merged = sorted((merged, group), key=len)
            merged.extend(small)
            for position in small:
                groups[position] = merged
    distinct = {id(group): group for group in groups.values()}
    return tuple(sorted(tuple(sorted(group)) for group in distinct.values()))


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout as the blob whose digest is its fingerprint; raises RegistrationError if it is too large."""
    data = _ENCODER.encode(layout)
    if len(data) > MAX_LAYOUT_BYTES:
        raise RegistrationError(
            f"the description of {len(layout.tensors):,} tensors takes {len(data):,} bytes; the limit is "
            f"{MAX_LAYOUT_BYTES:,}: use shorter names or more shards"
        )
    return data


def decode_layout(data: bytes) -> Layout:
    """Decode and check a blob from anyone, in work bounded by its size; raises LayoutMismatch saying what is wrong."""
    if len(data) > MAX_LAYOUT_BYTES:
        raise LayoutMismatch(f"a layout of {len(data):,} bytes is over the limit of {MAX_LAYOUT_BYTES:,}")
    try:
        layout = _DECODER.decode(data)
        check_layout(layout)
    except (msgspec.DecodeError, RecursionError, RegistrationError) as error:
        raise LayoutMismatch(f"the peer's layout is not valid: {error}") from None
    # One layout has one fingerprint only if it has one encoding.
    if _ENCODER.encode(layout) != data:
        raise LayoutMismatch("the peer's layout is not valid: it is not in canonical form")
    return layout


__all__ = [
    "MAX_LAYOUT_BYTES",
    "SEGMENT_BYTES",
    "build_layout",
    "decode_layout",
    "digest_of",
    "dtype_bytes",
    "encode_layout",
]
