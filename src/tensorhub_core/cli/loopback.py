"""Read memory of a child process through a transport, check it and say how fast that was."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, PeerId, ReadId, ReadState, Region, Transport
from tensorhub_core.transport.registry import make_transport

PROBE_BYTES = 128 << 20
_CHUNK_BYTES = 4 << 20
_WINDOW = 8
_TIMEOUT_S = 60.0
_POLL_PAUSE_S = 20e-6


@dataclass(frozen=True, slots=True)
class Loopback:
    """How a probe went; `gb_per_s` (1e9 bytes) is that of the second pass, when all memory had been touched."""

    works: bool
    probe_bytes: int
    gb_per_s: float | None = None
    reason: str = ""


def probe(name: str, probe_bytes: int = PROBE_BYTES, interface: str | None = None) -> Loopback:
    """Move `probe_bytes` from a child process to this one; never raises for what the transport does."""
    try:
        with _source(name, probe_bytes, interface) as offer:
            rate = _read(make_transport(name, interface=interface), offer)
        return Loopback(True, probe_bytes, rate)
    except TransportError as error:
        return Loopback(False, probe_bytes, reason=" ".join(str(error).split()))


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the child serves: its description, where the bytes lie, and their digest."""

    description: bytes
    address: int
    length_bytes: int
    digest: str


@contextlib.contextmanager
def _source(name: str, probe_bytes: int, interface: str | None) -> Iterator[_Offer]:
    command = [sys.executable, "-m", "tensorhub_core.cli.loopback", name, str(probe_bytes), *filter(None, [interface])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        guard = threading.Timer(_TIMEOUT_S, child.kill)
        guard.start()
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            line = child.stdout.readline()
            if not line.startswith(b"{"):
                child.kill()
                lines = child.stderr.read().decode(errors="replace").strip().splitlines()
                raise TransportError(lines[-1] if lines else "the serving process ended without a word")
            offer = json.loads(line)
            yield _Offer(bytes.fromhex(offer["description"]), offer["address"], probe_bytes, offer["digest"])
        finally:
            guard.cancel()
            child.kill()


def _read(transport: Transport, offer: _Offer) -> float:
    """Return the rate of the second of two passes in GB/s; raises TransportError if the bytes are not right."""
    memory = np.zeros(offer.length_bytes, np.uint8)
    try:
        transport.register([Region(memory.ctypes.data, memory.nbytes)])
        peer = transport.attach(offer.description)
        for _ in range(2):
            memory[:] = 0
            started = time.perf_counter()
            _pass(transport, peer, memory, offer.address, time.monotonic() + _TIMEOUT_S / 2)
            seconds = time.perf_counter() - started
            if xxhash.xxh3_128_hexdigest(memory.data) != offer.digest:
                raise TransportError("the bytes arrived wrong")
        return memory.nbytes / seconds / 1e9
    finally:
        transport.shutdown()


def _pass(transport: Transport, peer: PeerId, memory: NDArray[np.uint8], remote: int, deadline_s: float) -> None:
    starts = list(range(0, memory.nbytes, _CHUNK_BYTES))[::-1]
    reads: list[ReadId] = []
    while starts or reads:
        while starts and len(reads) < _WINDOW:
            start = starts.pop()
            length = min(_CHUNK_BYTES, memory.nbytes - start)
            local, there, count = np.array([[memory.ctypes.data + start], [remote + start], [length]], np.uint64)
            reads.append(transport.post(peer, Batch(local, there, count)))
        for read in list(reads):
            progress = transport.poll(read)
            if progress.state is ReadState.FAILED:
                raise TransportError(progress.error)
            if progress.state is ReadState.DONE:
                transport.close(read)
                reads.remove(read)
        if time.monotonic() > deadline_s:
            raise TransportError(f"no end within {_TIMEOUT_S / 2:g} s")
        time.sleep(_POLL_PAUSE_S)


def serve(name: str, probe_bytes: int, interface: str | None = None) -> None:
    """Serve random bytes until stdin closes: the child's side."""
    memory = np.random.default_rng(0).integers(0, 256, probe_bytes, np.uint8)
    transport = make_transport(name, interface=interface)
    try:
        transport.register([Region(memory.ctypes.data, memory.nbytes)])
        offer = {
            "description": transport.describe().hex(),
            "address": memory.ctypes.data,
            "digest": xxhash.xxh3_128_hexdigest(memory.data),
        }
        sys.stdout.write(json.dumps(offer) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        transport.shutdown()


if __name__ == "__main__":
    try:
        serve(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    except TransportError as error:
        sys.exit(str(error))
