"""Say which logical tensors a version consists of, from the layouts of whoever holds it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tensorhub_core.errors import LayoutMismatch
from tensorhub_core.layout.checks import MAX_BYTES
from tensorhub_core.layout.dtypes import dtype_bytes
from tensorhub_core.layout.types import IDENTITY_TAG, Layout


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A Hugging Face named tensor: `dtype` is torch's name without prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def logical_tensors(layouts: Iterable[Layout]) -> list[LogicalTensor]:
    """Return the logical tensors, sorted by name, that the shards of one replica hold together.

    A tensor that is spread over boxes is as large as the boxes reach. Raises LayoutMismatch if a shard's bytes are in
    a processed form, two shards disagree about a dtype, or a tensor would be larger than any memory.
    """
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    differences = []
    for layout in layouts:
        if layout.tag != IDENTITY_TAG:
            raise LayoutMismatch(f"shard {layout.shard} holds a processed form ({layout.tag!r}), not logical tensors")
        for spec in layout.tensors:
            parts = (
                [(spec.name, spec.shape)]
                if spec.boxes is None
                else [
                    (box.logical, tuple(at + size for at, size in zip(box.offset, box.shape, strict=True)))
                    for box in spec.boxes
                ]
            )
            for name, reach in parts:
                if dtypes.setdefault(name, spec.dtype) != spec.dtype:
                    differences.append(f"{name}: {dtypes[name]} in one shard, {spec.dtype} in another")
                known = shapes.setdefault(name, reach)
                if len(known) != len(reach):
                    differences.append(f"{name}: {len(known)} axes in one shard, {len(reach)} in another")
                else:
                    shapes[name] = tuple(max(pair) for pair in zip(known, reach, strict=True))
    differences += [
        f"{name}: {dtypes[name]} {shape} is larger than any memory"
        for name, shape in shapes.items()
        if math.prod(shape) * dtype_bytes(dtypes[name]) > MAX_BYTES
    ]
    if differences:
        raise LayoutMismatch("the shards of the source disagree: " + "; ".join(differences), tuple(differences))
    return [LogicalTensor(name, dtypes[name], shapes[name]) for name in sorted(shapes)]
