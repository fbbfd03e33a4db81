"""Cut storages into segments: boxes that are also contiguous byte runs, numbered in canonical order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.types import Layout, Segment


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """List a layout's segments: `storage` i32, `offset_bytes` u64 and `length_bytes` u64, all [segments].

    The segments of storage `i` are `first[i] .. first[i + 1]` (`first` i64 [storages + 1]).
    """

    storage: NDArray[np.int32]
    offset_bytes: NDArray[np.uint64]
    length_bytes: NDArray[np.uint64]
    first: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.storage)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all segments."""
        return int(self.length_bytes.sum())


def segment_table(layout: Layout) -> SegmentTable:
    """Number the layout's segments in canonical order: by storage, then by offset."""
    raise NotImplementedError


def segment_box(layout: Layout, table: SegmentTable, index: int) -> Segment:
    """Return one segment with its box; raises IndexError when there is none of that number."""
    raise NotImplementedError
