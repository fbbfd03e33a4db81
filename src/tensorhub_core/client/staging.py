"""Hold the host memory in which segments of other layouts arrive before they are copied to their places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.transport.base import Region, Transport


class Staging:
    """A bounded number of equal slots, registered once with the transport and reused; one thread."""

    def __init__(self, transport: Transport, limit_bytes: int, most_slots: int) -> None:
        """Hold nothing yet; later at most `limit_bytes`, or one slot if that is larger."""
        self._transport = transport
        self._limit_bytes = limit_bytes
        self._most_slots = most_slots
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._free: list[int] = []
        self.slot_bytes = 0

    def prepare(self, slot_bytes: int) -> None:
        """Make sure that slots have `slot_bytes`, and that all are free; no read may be in flight.

        Raises TransportError if the memory cannot be registered.
        """
        if slot_bytes > self.slot_bytes:
            count = max(1, min(self._most_slots, self._limit_bytes // slot_bytes))
            memory = np.empty(count * slot_bytes, np.uint8)
            self._transport.register_local([Region(memory.ctypes.data, memory.nbytes)])
            self._memory, self.slot_bytes = memory, slot_bytes
        self._free = list(range(len(self._memory) // self.slot_bytes)) if self.slot_bytes else []

    def take(self) -> int | None:
        """Return a free slot's number, or None."""
        return self._free.pop() if self._free else None

    def give_back(self, number: int) -> None:
        """Free a slot."""
        self._free.append(number)

    def slot(self, number: int) -> NDArray[np.uint8]:
        """Return a slot's memory, u8 [slot bytes]."""
        return self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def release(self) -> None:
        """Give all memory back; no read may be in flight."""
        if self.slot_bytes:
            self._transport.register_local([])
        self._memory, self._free, self.slot_bytes = np.empty(0, np.uint8), [], 0
