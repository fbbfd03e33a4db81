"""How large the parts of a request may be: the decoder refuses larger ones by name, before anything is stored.

Names and the sizes of whole messages and blobs have bounds of their own, in the machine and in the codec.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST_SERVER_EPOCH = 1 << 62
"""Epochs are milliseconds of a wall clock, or a little above: no server has a higher one than this."""
MOST_COUNT = (1 << 63) - 1
"""The largest number of a version, an epoch or a round: one more still has a place in a message."""
MOST_BYTES = (1 << 46) - 1
"""The largest shard; those of all shards together have a place in a message as well."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
"""A number of a version, an epoch, a round, or how many of something."""
Size = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]
"""Bytes of a shard."""
MOST_TEXT = 1 << 14
"""Characters of an error's text."""

BlobDigest = Annotated[bytes, msgspec.Meta(max_length=64)]
"""The digest of a blob."""
MOST_DETAIL = 512
"""Characters of what a reader says about one source that failed it: it is repeated in errors of all shards."""
Detail = Annotated[str, msgspec.Meta(max_length=MOST_DETAIL)]
"""What exactly failed."""
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]
"""An error's text."""
Id = Annotated[str, msgspec.Meta(max_length=256)]
"""An id of a lease or a copy, or an error's wire code."""
MOST_CUTS = 8192
"""Cuts that are asked for at once."""
PACKED_CUT_BYTES = 40
Cuts = Annotated[bytes, msgspec.Meta(max_length=MOST_CUTS * PACKED_CUT_BYTES)]
"""Packed cuts, as of `layout.cuts.pack_cuts`."""
CutChecksums = Annotated[bytes, msgspec.Meta(max_length=MOST_CUTS * 8)]
"""One little-endian u64 a cut."""
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=4096)]
