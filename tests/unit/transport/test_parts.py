"""Parts of a batch together are the batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.transport.base import Batch
from tensorhub_core.transport.parts import split


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 60))
def test_every_byte_is_in_one_part(lengths: list[int], most: int, least: int) -> None:
    length = np.array(lengths, np.uint64)
    local = np.cumsum(length + np.uint64(3)) - length + np.uint64(1_000)
    remote = local * np.uint64(2)
    parts = split(Batch(local, remote, length, "cpu", "cuda:0"), most, least)
    assert len(parts) == max(1, min(most, sum(lengths) // least))
    sizes = [int(part.length_bytes.sum()) for part in parts]
    assert sum(sizes) == sum(lengths)
    assert max(sizes) - min(sizes) <= 1 or len(parts) == 1
    assert all((part.length_bytes > 0).all() for part in parts)
    assert {(part.local_device, part.remote_device) for part in parts} == {("cpu", "cuda:0")}

    def pairs(batch: Batch) -> list[tuple[int, int]]:
        runs = zip(batch.local.tolist(), batch.remote.tolist(), batch.length_bytes.tolist(), strict=True)
        return [(here + at, there + at) for here, there, size in runs for at in range(size)]

    assert [pair for part in parts for pair in pairs(part)] == pairs(Batch(local, remote, length))
