"""Large batches of the cma transport, copied by several threads."""

from __future__ import annotations

import threading

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


def test_without_threads_a_large_batch_is_copied_by_those_there_are_and_nothing_lands_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, here = np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    source, reader = CmaTransport("source"), CmaTransport("reader", threads=4)
    source.register([Region(there.ctypes.data, there.nbytes)])
    reader.register_local([Region(here.ctypes.data, here.nbytes)])
    peer, start, begun = reader.attach(source.describe()), threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    runs = [np.array([number], np.uint64) for number in (here.ctypes.data, there.ctypes.data, here.nbytes)]
    read = reader.post(peer, Batch(*runs))
    assert len(begun) > 1
    assert reader.poll(read).state is ReadState.DONE
    assert here.all()
    here[:] = 0
    assert not any(thread.is_alive() for thread in begun)
    again = reader.post(peer, Batch(*runs))
    assert reader.poll(again).state is ReadState.DONE
    assert here.all()
