"""Eight bytes that another process writes all the time are read whole by every transport: followers look at them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tensorhub_core.client.prefix_word import segments_in
from tensorhub_core.transport.base import ReadState
from tests.transport.lab import Lab, batch
from tests.transport.peer import TAG
from tests.transport.test_conformance import every
from tests.transport.test_conformance import lab as lab
from tests.transport.test_conformance import pool as pool

pytestmark = pytest.mark.timeout(120)


@every
def test_a_word_that_is_being_written_is_read_whole_beside_other_reads(lab: Lab) -> None:
    peer, size = lab.peer(), 1 << 20
    peer.count()
    memory = lab.memory(size + 8)
    attached, word = lab.reader.attach(peer.description), memory[size:].view(np.uint64)
    seen, end = [0], time.monotonic() + 0.5
    while time.monotonic() < end or seen[-1] == seen[1]:
        beside = lab.reader.post(attached, batch((memory.ctypes.data, peer.address + size, size)))
        lab.read(attached, batch((memory.ctypes.data + size, peer.address, 8)))
        assert lab.end_of(beside) is ReadState.DONE
        assert lab.reader.close(beside)
        seen.append(segments_in(int(word[0]), TAG, 1 << 32))
    assert seen == sorted(seen)
    assert seen[1] > 0
