"""Transports with memory of their own, for the tests of the tcp transport alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tensorhub_core.transport.base import PeerId, ReadId, ReadState, Region
from tensorhub_core.transport.description import decode_description, encode_description
from tensorhub_core.transport.tcp import TcpTransport
from tensorhub_core.transport.tcp_wire import TcpOffer, decode_metadata, encode_metadata
from tests.transport.lab import batch

MIB = 1 << 20


class Side:
    """A transport and `memory` u8 [bytes] that it registered."""

    def __init__(self, memory: np.ndarray, token: str = "test") -> None:
        self.memory = memory
        self.transport = TcpTransport(token, connect_timeout_s=1.0)
        self.transport.register([Region(memory.ctypes.data, memory.nbytes)])

    @property
    def at(self) -> int:
        """Return the memory's address."""
        return self.memory.ctypes.data

    def post(self, peer: PeerId, there: int, size: int) -> ReadId:
        """Ask for `size` bytes into the front of the memory."""
        return self.transport.post(peer, batch((self.at, there, size)))

    def end_of(self, read: ReadId) -> ReadState:
        """Poll a read to its end."""
        end = time.monotonic() + 20
        while (state := self.transport.poll(read).state) is ReadState.ACTIVE and time.monotonic() < end:
            time.sleep(0.0002)
        return state

    def read(self, peer: PeerId, there: int, size: int) -> np.ndarray:
        """Read and return the front of the memory."""
        read = self.post(peer, there, size)
        assert self.end_of(read) is ReadState.DONE, self.transport.poll(read).error
        assert self.transport.close(read)
        return self.memory[:size]


def seeded(seed: int, size: int) -> np.ndarray:
    """Return random bytes u8 [size]."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a condition that has to come."""
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def offer_of(side: Side) -> tuple[str, TcpOffer]:
    """Return the agent's name and what its description carries."""
    found = decode_description(side.transport.describe(), "tcp")
    return found.agent, decode_metadata(found.metadata)


def described(agent: str, offer: TcpOffer) -> bytes:
    """Return the description of an offer."""
    return encode_description("tcp", agent, encode_metadata(offer))
