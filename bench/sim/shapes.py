"""What workers register: a shard of a layout, of some size, and the checksums of its versions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.state.messages import PutBlob


def blob(data: bytes) -> PutBlob:
    """Return a blob with its digest."""
    return PutBlob(digest_of(data), data)


@dataclass(eq=False)
class Shape:
    """What a worker registers: its shard's layout, and the checksums of each version, shared by all who hold it."""

    layout: PutBlob
    total_bytes: int
    segment_bytes: int
    _sums: dict[int, PutBlob] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        """Return how many segments the shard has."""
        return math.ceil(self.total_bytes / self.segment_bytes)

    def sums(self, version: int) -> PutBlob:
        """Return the checksums of a version; made up, of the right size, and unlike those of any other shard."""
        known = self._sums.get(version)
        if known is None:
            text = f"sums {version} ".encode() + self.layout.digest
            known = self._sums[version] = blob(text.ljust(8 * self.segments, b"\0")[: 8 * self.segments])
        return known
