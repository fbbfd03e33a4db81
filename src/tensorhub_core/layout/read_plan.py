"""Hold a read plan as arrays, so that 60,000 small reads cost no objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.cuts import Cuts, box_of_form, no_cuts
from tensorhub_core.layout.regions import Point
from tensorhub_core.layout.scatter import Scatter
from tensorhub_core.layout.segments import SegmentTable


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """List the reads that fill a destination; every array is [reads].

    Read `i` fetches `length_bytes[i]` (u64) of `segment[i]` (i32) of `sources[source[i]]` (i32): all of it where
    `cut[i]` (i32) is -1, else the bytes of cut number `cut[i]` of `cuts`. A segment is read once, or in several cuts.
    The cuts are in the order of their reads.

    Where `direct[i]`, what was read lands as it is, in one run, at `offset_bytes[i]` (u64) of the destination's storage
    `storage[i]` (i32). Elsewhere it is staged, as one run, and copied out by `scatters[i]`; storage and offset then say
    where the first of its bytes goes. Scatters take the staged bytes for a C-ordered box: the segment's own
    (`segment_box`), and of a cut the smaller box of that one that its runs are (`shape_of_read`), with as many axes.

    Where dtypes differ (`casts`: somewhere they do) reads are staged, and converted as they are copied out; lengths are
    in the source's bytes, offsets in those of the storage that they count in.

    Reads are in the destination's canonical order. In a `raw` plan, read `i` is segment `i`, and every source has it:
    `source` then says nothing, and nothing is cut.
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
    cut: NDArray[np.int32]
    cuts: Cuts
    casts: bool = False

    def __len__(self) -> int:
        return len(self.segment)

    def cuts_of(self, source: int) -> Cuts:
        """Return the cuts of one source, in the order of their reads."""
        return self.cuts.take(self.cut[(self.source == source) & (self.cut >= 0)])


def shape_of_read(plan: ReadPlan, read: int, shape: Point, item_bytes: int) -> Point:
    """Return the shape of what a read brings, in elements: its segment's `shape`, or of a cut that of its box."""
    cut = int(plan.cut[read])
    if cut < 0:
        return shape
    cuts = plan.cuts
    in_bytes = (cuts.offset_bytes[cut], cuts.run_bytes[cut], cuts.stride_bytes[cut])
    offset, run, stride = (int(number) // item_bytes for number in in_bytes)
    return box_of_form((offset, run, stride, int(cuts.count[cut])), shape)[1]


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
        cut=np.full(count, -1, np.int32),
        cuts=no_cuts(),
    )
