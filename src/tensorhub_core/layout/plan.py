"""Plan how a destination is filled from the segments of its sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """List the segment reads that fill a destination; every array is [reads].

    Read `i` fetches the whole of `segment[i]` (i32) of `sources[source[i]]` (i32), `length_bytes[i]` (u64) long. Where
    `direct[i]`, it lands as it is at `offset_bytes[i]` (u64) of the destination's storage `storage[i]` (i32); otherwise it
    is staged and copied out by `scatters[i]`, and storage and offset say where the first byte goes. No segment is read
    twice. Reads are in the destination's canonical order; in a `raw` plan, read `i` is segment `i` on both sides.
    """

    raw: bool
    source: NDArray[np.int32]
    segment: NDArray[np.int32]
    length_bytes: NDArray[np.uint64]
    direct: NDArray[np.bool_]
    storage: NDArray[np.int32]
    offset_bytes: NDArray[np.uint64]
    scatters: Mapping[int, tuple[Scatter, ...]]
    total_bytes: int

    def __len__(self) -> int:
        return len(self.segment)


def plan_raw(table: SegmentTable) -> ReadPlan:
    """Plan a copy between two layouts of equal fingerprint, segment by segment."""
    raise NotImplementedError


def plan_read(
    destination: Layout, sources: Sequence[Layout], sums: Sequence[NDArray[np.uint64]] | None = None
) -> ReadPlan:
    """Plan how `destination` is filled from one equal layout or from the shards of a replica in other layouts.

    `sums` u64 [segments] per source lets bytes that must be equal be compared before anything moves. Proves that every
    box of the destination is covered exactly. Raises LayoutMismatch listing all differences. Any thread.
    """
    raise NotImplementedError
