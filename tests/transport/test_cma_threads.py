"""Large batches of the cma transport, copied by several threads."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub_core.transport.base import Batch, ReadState, Region
from tensorhub_core.transport.cma import CmaTransport


@pytest.mark.parametrize("threads", [1, 3])
def test_large_batches_are_copied_by_several_threads(threads: int) -> None:
    source, reader = CmaTransport("source"), CmaTransport("reader", threads=threads)
    truth = np.random.default_rng(threads).integers(0, 256, 9_000_001, np.uint8)
    memory = np.full(truth.size + 2, 0xA5, np.uint8)
    source.register([Region(truth.ctypes.data, truth.size)])
    reader.register([Region(memory.ctypes.data, memory.size)])
    peer = reader.attach(source.describe())
    cuts = np.sort(np.random.default_rng(5).choice(truth.size, 2_500, replace=False)).astype(np.uint64)
    begin = np.concatenate(([0], cuts)).astype(np.uint64)
    length = np.diff(np.append(begin, np.uint64(truth.size)))
    for begins, lengths in [(begin, length), (np.zeros(1, np.uint64), np.array([truth.size], np.uint64))]:
        memory[:] = 0xA5
        here = begins + np.uint64(memory.ctypes.data + 1)
        read = reader.post(peer, Batch(here, begins + np.uint64(truth.ctypes.data), lengths))
        assert reader.poll(read).state is ReadState.DONE
        assert np.array_equal(memory[1:-1], truth)
        assert memory[0] == memory[-1] == 0xA5
    source.revoke()
    read = reader.post(peer, Batch(here, begins + np.uint64(truth.ctypes.data), lengths))
    assert reader.poll(read).state is ReadState.FAILED
    for transport in (source, reader):
        transport.shutdown()
