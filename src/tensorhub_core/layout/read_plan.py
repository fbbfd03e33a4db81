"""Hold a read plan as arrays, so that 60,000 small reads cost no objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.segments import SegmentTable


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """List the segment reads that fill a destination; every array is [reads].

    Read `i` fetches the whole of `segment[i]` (i32) of `sources[source[i]]` (i32), `length_bytes[i]` (u64) long. Where
    `direct[i]`, it lands as it is at `offset_bytes[i]` (u64) of the destination's storage `storage[i]` (i32). Elsewhere
    it is staged and copied out by `scatters[i]`; storage and offset then say where the first of its bytes goes. No
    segment is read twice. Reads are in the destination's canonical order. In a `raw` plan, read `i` is segment `i`, and
    every source has it: `source` then says nothing.
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
    count = len(table)
    return ReadPlan(
        raw=True,
        source=np.zeros(count, np.int32),
        segment=np.arange(count, dtype=np.int32),
        length_bytes=table.length_bytes,
        direct=np.ones(count, np.bool_),
        storage=table.storage,
        offset_bytes=table.offset_bytes,
        scatters={},
        total_bytes=table.total_bytes,
    )
