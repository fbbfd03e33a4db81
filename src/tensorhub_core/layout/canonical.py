"""Build, encode and check layouts, so that equal sets of tensors have equal bytes and hostile bytes are refused."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from tensorhub_core.ids import Digest
from tensorhub_core.layout.types import IDENTITY_TAG, Layout, TensorSpec

SEGMENT_BYTES = 4 << 20


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of a torch dtype; raises RegistrationError for an unknown one."""
    raise NotImplementedError


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
) -> Layout:
    """Build the canonical layout of tensors given in any order.

    Each group of `aliases` names tensors that share exactly the same bytes (and so have one dtype and shape). Raises
    RegistrationError naming the tensor that cannot be described. Any thread.
    """
    raise NotImplementedError


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout as the blob whose digest is its fingerprint; raises RegistrationError if it is too large."""
    raise NotImplementedError


def decode_layout(data: bytes) -> Layout:
    """Decode and check a blob from anyone, in work bounded by its size; raises LayoutMismatch saying what is wrong."""
    raise NotImplementedError
