"""Sum up what a read plan reads, of which source and how, for people who look at it before anything moves; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Layout, TensorSpec


@dataclass(frozen=True, slots=True)
class FromSource:
    """What a plan reads from one shard."""

    shard: int
    read_bytes: int
    reads: int
    runs: int


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan reads: `segments` whole ones and `cuts` of others.

    `needed_bytes` are those of the destination's boxes, in its dtypes. `direct_bytes` land where they belong,
    `staged_bytes` are copied once more, from pieces of at most `largest_staged_bytes`. `runs` counts what a transport
    is asked for: neighbours on both sides are one run. Of a `raw` plan `sources` has one entry: every source has all.
    """

    raw: bool
    needed_bytes: int
    read_bytes: int
    segments: int
    cuts: int
    runs: int
    direct_bytes: int
    staged_bytes: int
    largest_staged_bytes: int
    sources: tuple[FromSource, ...]

    @property
    def ratio(self) -> float:
        """Return the bytes read for each byte needed; 1 if none is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0

    def as_dict(self) -> dict[str, object]:
        """Return all of it by name, for JSON."""
        return {**asdict(self), "ratio": self.ratio}


def summarize(plan: ReadPlan, destination: Layout, sources: Sequence[Layout]) -> PlanSummary:
    """Sum up a plan of `plan_read(destination, sources)`. Any thread."""
    length = plan.length_bytes.astype(np.int64)
    whole = plan.cut < 0
    runs = _runs_of_reads(plan, sources)
    staged = length[~plan.direct]
    shards = []
    for number, layout in enumerate(sources[:1] if plan.raw else sources):
        mine = plan.source == number
        shards.append(FromSource(layout.shard, int(length[mine].sum()), int(mine.sum()), int(runs[mine].sum())))
    return PlanSummary(
        raw=plan.raw,
        needed_bytes=plan.total_bytes if plan.raw else needed_bytes(destination),
        read_bytes=int(length.sum()),
        segments=int(whole.sum()),
        cuts=int((~whole).sum()),
        runs=int(runs.sum()),
        direct_bytes=int(length[plan.direct].sum()),
        staged_bytes=int(staged.sum()),
        largest_staged_bytes=int(staged.max(initial=0)),
        sources=tuple(shards),
    )


def needed_bytes(layout: Layout) -> int:
    """Return how many bytes of a layout another one has to fill: those of its boxes, shared storages once."""
    return sum(max(_box_bytes(layout.tensors[tensor]) for tensor in group) for group in layout.storages)


def _box_bytes(spec: TensorSpec) -> int:
    shapes = [spec.shape] if spec.boxes is None else [box.shape for box in spec.boxes]
    return sum(map(prod, shapes)) * dtype_bytes(spec.dtype)


def _runs_of_reads(plan: ReadPlan, sources: Sequence[Layout]) -> NDArray[np.int64]:
    """Return how many runs each read adds, i64 [reads]: none where it goes on where the one before it ends."""
    runs: NDArray[np.int64] = np.ones(len(plan), np.int64)
    is_cut = plan.cut >= 0
    runs[is_cut] = plan.cuts.count[plan.cut[is_cut]]
    order = np.argsort(plan.source, kind="stable")
    there, begin = _places(plan, sources)
    length = plan.length_bytes.astype(np.int64)
    one, next_ = order[:-1], order[1:]
    joins = plan.direct[one] & plan.direct[next_] & (runs[one] == 1) & (runs[next_] == 1)
    joins &= (plan.source[one] == plan.source[next_]) & (there[one] == there[next_])
    joins &= (plan.storage[one] == plan.storage[next_]) & (begin[one] + length[one] == begin[next_])
    joins &= plan.offset_bytes[one] + plan.length_bytes[one] == plan.offset_bytes[next_]
    runs[next_[joins]] = 0
    return runs


def _places(plan: ReadPlan, sources: Sequence[Layout]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each read begins: the source's storage, and the bytes from its begin; i64 [reads] both."""
    storage: NDArray[np.int64] = np.zeros(len(plan), np.int64)
    begin: NDArray[np.int64] = np.zeros(len(plan), np.int64)
    for number, layout in enumerate(sources[:1] if plan.raw else sources):
        table = segment_table(layout)
        mine = plan.source == number
        storage[mine] = table.storage[plan.segment[mine]]
        begin[mine] = table.offset_bytes[plan.segment[mine]].astype(np.int64)
    is_cut = plan.cut >= 0
    begin[is_cut] += plan.cuts.offset_bytes[plan.cut[is_cut]]
    return storage, begin


def reads_of(plan: ReadPlan, destination: Layout, sources: Sequence[Layout]) -> Iterator[Mapping[str, Any]]:
    """Yield every read of a plan by names, one after the other, for JSON.

    `offset_bytes`, `run_bytes`, `stride_bytes` and `count` say which bytes of the source's tensor are read; `to` is the
    tensor in which the first of them land, `to_offset_bytes` the place. Where not `direct`, `to` has what is staged.
    """
    storages, begins = _places(plan, sources)
    cuts = plan.cuts
    for read in range(len(plan)):
        cut, source = int(plan.cut[read]), int(plan.source[read])
        length = int(plan.length_bytes[read])
        form = (length, length, 1)
        if cut >= 0:
            form = int(cuts.run_bytes[cut]), int(cuts.stride_bytes[cut]), int(cuts.count[cut])
        run, stride, count = form
        yield {
            "shard": sources[source].shard,
            "tensor": _name(sources[source], int(storages[read])),
            "segment": int(plan.segment[read]),
            "offset_bytes": int(begins[read]),
            "run_bytes": run,
            "stride_bytes": stride,
            "count": count,
            "direct": bool(plan.direct[read]),
            "to": _name(destination, int(plan.storage[read])),
            "to_offset_bytes": int(plan.offset_bytes[read]),
        }


def _name(layout: Layout, storage: int) -> str:
    return layout.tensors[layout.storages[storage][0]].name
