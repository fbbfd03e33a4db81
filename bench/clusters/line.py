"""One direction of a long link: a rate, a delay and a queue with an end. Pure: the time is an argument.

A frame waits until those before it have been sent, is sent at the line's rate, and arrives a delay later. What would
make the queue longer than it may be is dropped, as a router does.
"""

from __future__ import annotations

from collections import deque

_VNET_HEADER_BYTES = 10
_GSO_TYPES = 0x7F
_TCP_OFFSET_BYTES = 12


class Line:
    """A line and what is on it; one thread at a time."""

    def __init__(self, rate_bytes_per_s: float, delay_s: float, queue_bytes: float) -> None:
        self.rate_bytes_per_s, self.delay_s, self.queue_bytes = rate_bytes_per_s, delay_s, queue_bytes
        self._free_s = 0.0
        self._travelling: deque[tuple[float, bytes]] = deque()
        self.carried_bytes = 0
        self.dropped_bytes = 0
        self.longest_queue_bytes = 0.0

    def offer(self, frame: bytes, size_bytes: int, now_s: float) -> bool:
        """Take a frame of this size on the wire; False if it is dropped."""
        begin_s = max(now_s, self._free_s)
        queue_bytes = (begin_s - now_s) * self.rate_bytes_per_s
        if queue_bytes > self.queue_bytes:
            self.dropped_bytes += size_bytes
            return False
        self.longest_queue_bytes = max(self.longest_queue_bytes, queue_bytes)
        self._free_s = begin_s + size_bytes / self.rate_bytes_per_s
        self._travelling.append((self._free_s + self.delay_s, frame))
        self.carried_bytes += size_bytes
        return True

    def arrived(self, now_s: float) -> list[bytes]:
        """Return the frames that have come to the other end, in their order."""
        frames = []
        while self._travelling and self._travelling[0][0] <= now_s:
            frames.append(self._travelling.popleft()[1])
        return frames

    def next_s(self) -> float | None:
        """Return when the next frame arrives, None if none travels."""
        return self._travelling[0][0] if self._travelling else None


def size_on_wire(packet: bytes) -> int:
    """Return how many bytes a packet of a TAP device (with its virtio header) takes on a wire.

    The kernel hands over runs of TCP segments as one: each of them would have had headers of its own.
    """
    size_bytes = len(packet) - _VNET_HEADER_BYTES
    segment_bytes = int.from_bytes(packet[4:6], "little")
    if not packet[1] & _GSO_TYPES or segment_bytes == 0:
        return size_bytes
    tcp = int.from_bytes(packet[6:8], "little")
    at = _VNET_HEADER_BYTES + tcp + _TCP_OFFSET_BYTES
    if at >= len(packet):
        return size_bytes
    header_bytes = tcp + 4 * (packet[at] >> 4)
    segments = max(1, -(-(size_bytes - header_bytes) // segment_bytes))
    return size_bytes + (segments - 1) * header_bytes
