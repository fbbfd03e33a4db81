"""Work out which whole tensors a version consists of from the layouts in which it is held; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.casting import may_cast
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.layout.types import Box, Layout, TensorSpec

_MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class HeldBy:
    """One shard of a replica that holds the version; `converted`: not in the publisher's dtypes."""

    replica: str
    layout: Layout
    converted: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """The whole tensors of a version: `aliases` groups names of the same bytes.

    `segment_bytes` is that of the holders, so that a reader who uses it too copies segments as they are.
    """

    replica: str
    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, ...], ...]
    segment_bytes: int

    def in_dtype(self, dtype: str) -> Inventory:
        """Return the same with all tensors in this dtype that can be converted into it."""
        tensors = [
            TensorSpec(tensor.name, dtype, tensor.shape, tensor.boxes)
            if may_cast(dtype, tensor.dtype, dtype)
            else tensor
            for tensor in self.tensors
        ]
        return replace(self, tensors=tuple(tensors))


def take_inventory(holders: Sequence[HeldBy]) -> Inventory:
    """Return the whole tensors, preferably as one worker holds them by name, else assembled from a replica's boxes.

    Converted ones come last. Raises LayoutMismatch saying for every replica why its layouts do not add up to whole
    tensors.
    """
    replicas: dict[str, list[Layout]] = {}
    for holder in holders:
        replicas.setdefault(holder.replica, []).append(holder.layout)
    reasons: list[str] = []
    converted = {holder.replica for holder in holders if holder.converted}
    by_preference = sorted(
        replicas.items(), key=lambda item: (item[0] in converted, not _is_whole(item[1]), len(item[1]), item[0])
    )
    for replica, layouts in by_preference:
        layouts.sort(key=lambda layout: layout.shard)
        reason = _incomplete(layouts)
        if reason is None:
            try:
                return _assemble(replica, layouts)
            except LayoutMismatch as error:
                reason = "; ".join(error.differences[:_MAX_REASONS]) or str(error)
        reasons.append(f"{replica}: {reason}")
    if not reasons:
        raise LayoutMismatch("the version is held in no layout at all")
    raise LayoutMismatch(
        f"the version cannot be written as whole tensors: {' | '.join(reasons[:_MAX_REASONS])}", tuple(reasons)
    )


def _is_whole(layouts: Sequence[Layout]) -> bool:
    return len(layouts) == 1 and layouts[0].num_shards == 1 and _is_plain(layouts[0])


def _is_plain(layout: Layout) -> bool:
    return not layout.tag and all(tensor.boxes is None for tensor in layout.tensors)


def _incomplete(layouts: Sequence[Layout]) -> str | None:
    tags = sorted({layout.tag for layout in layouts if layout.tag})
    if tags:
        return f"holds it in the processed form {tags[0]!r}, which only an engine like it can read"
    count = max(layout.num_shards for layout in layouts)
    missing = sorted(set(range(count)) - {layout.shard for layout in layouts})
    if missing:
        return f"shards {missing} of {count} are not held"
    return None


def _assemble(replica: str, layouts: Sequence[Layout]) -> Inventory:
    segment_bytes = layouts[0].segment_bytes
    if _is_whole(layouts):
        (layout,) = layouts
        names = tuple(tuple(layout.tensors[i].name for i in group) for group in layout.storages if len(group) > 1)
        return Inventory(replica, layout.tensors, names, segment_bytes)
    tensors = tuple(_logical_tensors(layouts))
    whole = build_layout(tensors, shard=0, num_shards=1, segment_bytes=segment_bytes)
    plan_read(whole, layouts)  # proves that the boxes cover every tensor
    return Inventory(replica, whole.tensors, (), segment_bytes)


def _logical_tensors(layouts: Sequence[Layout]) -> list[TensorSpec]:
    """Return every logical tensor with the smallest shape that all its boxes fit into."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    differences: list[str] = []
    for layout in layouts:
        for tensor in layout.tensors:
            for box in _boxes(tensor):
                end = tuple(start + length for start, length in zip(box.offset, box.shape, strict=True))
                dtype, shape = found.get(box.logical, (tensor.dtype, end))
                if dtype != tensor.dtype or len(shape) != len(end):
                    differences.append(f"shards disagree about dtype or axes of {box.logical!r}")
                    continue
                found[box.logical] = (dtype, tuple(map(max, shape, end)))
    if differences:
        raise LayoutMismatch(differences[0], tuple(dict.fromkeys(differences)))
    return [TensorSpec(name, dtype, shape) for name, (dtype, shape) in found.items()]


def _boxes(tensor: TensorSpec) -> tuple[Box, ...]:
    if tensor.boxes is not None:
        return tensor.boxes
    origin = (0,) * len(tensor.shape)
    return (Box(tensor.name, origin, tensor.shape, origin),)
