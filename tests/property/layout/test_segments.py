"""Segments are boxes and contiguous runs at once, and tile every storage."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub_core.layout.canonical import build_layout, dtype_bytes
from tensorhub_core.layout.segments import segment_box, segment_table
from tensorhub_core.layout.types import TensorSpec

SPECS = st.lists(
    st.tuples(
        st.sampled_from(("uint8", "bfloat16", "float32", "int64", "complex128")),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    max_size=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS, st.integers(16, 300))
def test_segments_tile_storages_as_boxes_and_as_runs(
    kinds: list[tuple[str, tuple[int, ...]]], segment_bytes: int
) -> None:
    specs = [TensorSpec(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(kinds)]
    layout = build_layout(specs, shard=0, num_shards=1, segment_bytes=segment_bytes)
    table = segment_table(layout)
    assert table.total_bytes == sum(
        int(np.prod(spec.shape, dtype=int)) * dtype_bytes(spec.dtype) for spec in layout.tensors
    )
    seen = 0
    for storage, spec in enumerate(layout.tensors):
        item_bytes = dtype_bytes(spec.dtype)
        numbers = np.arange(int(np.prod(spec.shape, dtype=int))).reshape(spec.shape)
        at = 0
        for index in range(int(table.first[storage]), int(table.first[storage + 1])):
            segment = segment_box(layout, table, index)
            assert (segment.index, segment.storage, segment.offset_bytes) == (index, storage, at)
            assert 0 < segment.length_bytes <= segment_bytes
            assert (table.storage[index], table.offset_bytes[index], table.length_bytes[index]) == (
                storage,
                segment.offset_bytes,
                segment.length_bytes,
            )
            box = numbers[(..., *(slice(a, a + n) for a, n in zip(segment.start, segment.shape, strict=True)))]
            assert box.shape == segment.shape
            run = np.arange(at // item_bytes, (at + segment.length_bytes) // item_bytes)
            assert np.array_equal(box.reshape(-1), run)
            at += segment.length_bytes
            seen += 1
        assert at == numbers.size * item_bytes
    assert seen == len(table)
