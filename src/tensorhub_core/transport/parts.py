"""Cut a batch into parts of about equal bytes, for several threads; pure."""

from __future__ import annotations

import numpy as np

from tensorhub_core.transport.base import Batch


def split(batch: Batch, most_parts: int, least_bytes: int) -> list[Batch]:
    """Return up to `most_parts` batches which together are `batch`, each of at least `least_bytes`; runs may be cut."""
    ends = np.cumsum(batch.length_bytes)
    total = int(ends[-1]) if len(ends) else 0
    count = max(1, min(most_parts, total // least_bytes))
    if count == 1:
        return [batch]
    begins = ends - batch.length_bytes
    parts = []
    for number in range(count):
        low, high = np.uint64(total * number // count), np.uint64(total * (number + 1) // count)
        first, last = np.searchsorted(ends, low, side="right"), np.searchsorted(begins, high, side="left")
        mine = slice(int(first), int(last))
        skip = np.maximum(begins[mine], low) - begins[mine]
        length = np.minimum(ends[mine], high) - begins[mine] - skip
        devices = batch.local_device, batch.remote_device
        parts.append(Batch(batch.local[mine] + skip, batch.remote[mine] + skip, length, *devices))
    return parts
