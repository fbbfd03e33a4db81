"""Peers that stay attached from job to job cost files and threads of others: none is left behind."""

from __future__ import annotations

from itertools import count

import pytest

from tensorhub_core.client.peers import MOST_IDLE_PEERS, Peers
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import PeerId
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport


class Counting(MemoryTransport):
    """Knows what is attached; refuses what is called bad."""

    def __init__(self) -> None:
        super().__init__(MemoryNetwork())
        self.attached: set[PeerId] = set()
        self._numbers = count()

    def attach(self, description: bytes) -> PeerId:
        if description == b"bad":
            raise TransportError("it cannot be attached")
        peer = PeerId(f"{description!r} {next(self._numbers)}")
        self.attached.add(peer)
        return peer

    def detach(self, peer: PeerId) -> None:
        self.attached.discard(peer)


def test_a_peer_stays_attached() -> None:
    transport = Counting()
    peers = Peers(transport)
    one = peers.attach(b"one")
    peers.trim()
    assert peers.attach(b"one") is one
    assert transport.attached == {one.peer}


def test_failures_leave_no_peer_attached_that_nobody_uses() -> None:
    transport = Counting()
    peers = Peers(transport)
    for job in range(20):
        peers.trim()
        good = [peers.attach(b"%d %d" % (job, number)).peer for number in range(3)]
        with pytest.raises(TransportError):
            peers.attach(b"bad")
        assert set(good) <= transport.attached  # what is on its way from them may land
    peers.trim()
    assert not transport.attached


def test_those_that_were_used_last_are_kept() -> None:
    transport = Counting()
    peers = Peers(transport)
    kept = [peers.attach(b"%d" % number).peer for number in range(2 * MOST_IDLE_PEERS)][MOST_IDLE_PEERS:]
    peers.trim()
    assert transport.attached == set(kept)
    peers.drop(b"%d" % (2 * MOST_IDLE_PEERS - 1))
    assert transport.attached == set(kept[:-1])
