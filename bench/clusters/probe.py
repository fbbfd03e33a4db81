"""A process that measures a path with plain sockets: round trips of one byte, and the rate of a stream."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from remote import answer

TIMEOUT_S = 60.0
_PIECE = bytes(64 << 10)


class Probe:
    """One end of a path."""

    def commands(self) -> Mapping[str, Callable[..., Any]]:
        """Return what this process can be told."""
        return {"serve": self.serve, "round_trip": self.round_trip, "stream": self.stream}

    def serve(self, address: str) -> int:
        """Echo single bytes, and count streams; return the port."""
        listener = socket.create_server((address, 0))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            peer = listener.accept()[0]
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        """Send one byte back, or, after a stream, how many bytes it had."""
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with peer:
            got = 0
            while piece := peer.recv(1 << 20):
                got += len(piece)
                if piece == b"!":
                    peer.sendall(b"!")
            peer.sendall(str(got).encode())

    def round_trip(self, address: str, port: int, count: int) -> float:
        """Return the median seconds that a byte takes there and back."""
        with self._connection(address, port) as peer:
            took = []
            for _ in range(count):
                began = time.monotonic()
                peer.sendall(b"!")
                peer.recv(1)
                took.append(time.monotonic() - began)
        return statistics.median(took)

    def stream(self, address: str, port: int, total_bytes: int) -> float:
        """Return the seconds from the first byte sent until the other end says that it has them all."""
        with self._connection(address, port) as peer:
            began = time.monotonic()
            for at in range(0, total_bytes, len(_PIECE)):
                peer.sendall(_PIECE[: min(len(_PIECE), total_bytes - at)])
            peer.shutdown(socket.SHUT_WR)
            answered = int(peer.recv(64))
            ended = time.monotonic()
        if answered != total_bytes:
            raise ConnectionError(f"{answered} of {total_bytes} bytes came")
        return ended - began

    def _connection(self, address: str, port: int) -> socket.socket:
        peer = socket.create_connection((address, port), TIMEOUT_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer


def main() -> None:
    """Serve commands until the input ends."""
    answer(lambda say: Probe().commands())


if __name__ == "__main__":
    main()
