"""The routers between datacentres: a process that carries Ethernet frames between the switches of zones.

It has a TAP device in the namespace of every zone's switch, and a `Line` for each direction between two zones. Frames
cross unchanged, so that every protocol does. The kernel may hand over up to 64 KiB of TCP segments as one frame: that
keeps the process cheap, and `size_on_wire` counts them as they would be on a wire.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from clusters.line import Line, size_on_wire
from remote import answer

DEVICE = "up0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_MOST_BYTES = 10 + 18 + (1 << 16)
_MOST_AT_ONCE = 64
_IDLE_S = 0.05
_VNET_HEADER_BYTES = 10
_NICE = -10


def open_tap(namespace: str) -> int:
    """Make a TAP device in a named network namespace; it goes when the descriptor is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{namespace}") as there:
        _enter(libc, there.fileno())
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
            fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
        finally:
            _enter(libc, home.fileno())
    return device


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class Forwarder:
    """The TAP devices, the lines between them, and the thread that serves them."""

    def __init__(self) -> None:
        self._taps: dict[str, int] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        self._where: dict[bytes, str] = {}
        """The zone in which an Ethernet address has been seen."""
        self._lock = threading.Lock()

    def commands(self) -> Mapping[str, Callable[..., Any]]:
        """Return what this process can be told."""
        return {"open": self.open, "link": self.link, "go": self.go, "counters": self.counters}

    def open(self, zones: Mapping[str, str]) -> str:
        """Make a device in the namespace of every zone's switch; return its name."""
        self._taps = {zone: open_tap(namespace) for zone, namespace in zones.items()}
        return DEVICE

    def link(self, one: str, other: str, rate_bytes_per_s: float, delay_s: float, queue_bytes: float) -> None:
        """Join two zones by a line in each direction."""
        for pair in ((one, other), (other, one)):
            self._lines[pair] = Line(rate_bytes_per_s, delay_s, queue_bytes)

    def go(self) -> None:
        """Begin to carry frames."""
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        threading.Thread(target=self._serve, daemon=True).start()

    def counters(self) -> list[dict[str, Any]]:
        """Return what each line has carried and dropped."""
        with self._lock:
            return [
                {
                    "from": source,
                    "to": target,
                    "carried_bytes": line.carried_bytes,
                    "dropped_bytes": line.dropped_bytes,
                    "longest_queue_bytes": line.longest_queue_bytes,
                }
                for (source, target), line in self._lines.items()
            ]

    def _serve(self) -> None:
        zones = {tap: zone for zone, tap in self._taps.items()}
        buffer = bytearray(_MOST_BYTES)
        while True:
            coming = [at for line in self._lines.values() if (at := line.next_s()) is not None]
            wait_s = min(_IDLE_S, max(0.0, min(coming, default=_IDLE_S + time.monotonic()) - time.monotonic()))
            ready, _, _ = select.select(list(zones), [], [], wait_s)
            with self._lock:
                for tap in ready:
                    self._take(tap, zones[tap], buffer)
                self._deliver()

    def _take(self, tap: int, zone: str, buffer: bytearray) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                packet = bytes(memoryview(buffer)[: os.readv(tap, [buffer])])
            except BlockingIOError:
                return
            frame = packet[_VNET_HEADER_BYTES:]
            target, source = frame[:6], frame[6:12]
            self._where[source] = zone
            size_bytes, now_s = size_on_wire(packet), time.monotonic()
            known = None if target[0] & 1 else self._where.get(target)
            if known == zone:
                continue
            for (begin, end), line in self._lines.items():
                if begin == zone and (known is None or end == known):
                    line.offer(packet, size_bytes, now_s)

    def _deliver(self) -> None:
        now_s = time.monotonic()
        for (_, end), line in self._lines.items():
            for packet in line.arrived(now_s):
                # A switch that cannot take a frame drops it; a device that is down has nobody behind it.
                with contextlib.suppress(BlockingIOError, OSError):
                    os.write(self._taps[end], packet)


def main() -> None:
    """Serve commands until the input ends."""
    answer(lambda say: Forwarder().commands())


if __name__ == "__main__":
    main()
