"""One face for every transport under test: a reader, and peers that can be killed, stopped and told to revoke."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from tensorhub_core.clock import SystemClock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.auto import AutoTransport
from tensorhub_core.transport.base import Batch, PeerId, ReadId, ReadState, Region, Transport
from tensorhub_core.transport.faults import FaultPlan, FaultyTransport
from tensorhub_core.transport.memory import MemoryNetwork, MemoryTransport
from tensorhub_core.transport.registry import make_transport
from tests.transport.peer import count_up, seeded

HAS_NIXL = importlib.util.find_spec("nixl") is not None  # importing it here would set its logging up
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")

ROOT = Path(__file__).resolve().parents[2]
SENTINEL = 0xA5
PEER_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 30.0
STEP_BYTES = 64 << 10
QUIET = ("tcp", "auto-tcp")
"""The kinds of which only the reader's own calls write into its memory."""
PEER_BYTES = 32 << 20
"""What every peer serves: much more than fits into the sockets between two processes."""


class Peer(Protocol):
    """A process (or what passes for one) that serves `data` u8 [bytes] at `address`."""

    description: bytes
    address: int
    data: NDArray[np.uint8]
    damaged: bool

    def kill(self) -> None:
        """End it without warning."""

    def stop(self) -> None:
        """Stop it as SIGSTOP does."""

    def go_on(self) -> None:
        """Let it go on."""

    def revoke(self) -> None:
        """Let it drop its serving side and unmap the memory."""

    def count(self) -> None:
        """Let it write words that count up into its first eight bytes, from now on."""

    def alive(self) -> bool:
        """Tell whether its process lives."""

    def end(self) -> None:
        """End it in any state."""


class Lab:
    """A reader under test and its peers."""

    def __init__(
        self,
        reader: Transport,
        peer: Callable[[], Peer],
        settle: Callable[[], None],
        busy_s: float = 0.0,
        quiet: bool = False,
    ) -> None:
        """`peer` returns one that nothing has happened to; `settle` lets bytes land that are still on their way.

        `busy_s` is how long a reader may well have no time for its reads. `quiet` is whether only the reader's own
        calls write, so that every close is quiet; else whatever has not ended goes on by itself.
        """
        self.quiet = quiet
        self.reader = reader
        self.busy_s = busy_s
        self.peer = peer
        self.settle = settle

    def memory(self, size: int, register: bool = True) -> NDArray[np.uint8]:
        """Return sentinel-filled memory, registered with the reader."""
        memory = np.full(size, SENTINEL, np.uint8)
        if register:
            self.reader.register([Region(memory.ctypes.data, size)])
        return memory

    def end_of(self, read: ReadId, timeout_s: float = READ_TIMEOUT_S) -> ReadState:
        """Poll a read until it ends; ACTIVE if it does not."""
        end = time.monotonic() + timeout_s
        while (state := self.reader.poll(read).state) is ReadState.ACTIVE and time.monotonic() < end:
            time.sleep(0.0005)
        return state

    def give_up(self, reads: Sequence[ReadId]) -> None:
        """Close reads that have not all ended well, as a worker does; afterwards none of their bytes can land."""
        quiet = [self.reader.close(read) for read in reads]
        if self.quiet:
            assert all(quiet)
        else:
            assert not all(quiet), "reads that go on by themselves, or have failed, are not quiet"
            self.reader.fence()

    def read(self, peer: PeerId, batch: Batch) -> None:
        """Read a batch to its end and close it."""
        read = self.reader.post(peer, batch)
        progress = self.reader.poll(read)
        assert self.end_of(read) is ReadState.DONE, progress.error
        assert self.reader.close(read)


def batch(*runs: tuple[int, int, int]) -> Batch:
    """Return a batch of (local, remote, length) runs."""
    local, remote, length = np.array(runs, np.uint64).T
    return Batch(local.copy(), remote.copy(), length.copy())


class ProcessPeer:
    """A peer in a process of its own."""

    def __init__(self, name: str, seed: int, within: Sequence[str] = ()) -> None:
        """Start it; `within` is a command that runs it elsewhere, such as in a namespace."""
        self.data = seeded(seed, PEER_BYTES)
        self.damaged = False
        command = [*within, sys.executable, "-m", "tests.transport.peer", name, str(seed), str(PEER_BYTES)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        answer = self._answer()
        self.description = bytes.fromhex(str(answer["description"]))
        self.address = int(str(answer["address"]))

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.damaged = True
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Send SIGSTOP and wait until every thread has stopped."""
        self.damaged = True
        os.kill(self.process.pid, signal.SIGSTOP)
        states = set()
        while states != {"T"}:
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
            states = {task.read_text().rpartition(")")[2].split()[0] for task in tasks}

    def go_on(self) -> None:
        """Send SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def revoke(self) -> None:
        """Tell it to revoke and wait until it has."""
        self.damaged = True
        self._ask("revoke")

    def count(self) -> None:
        """Tell it to count up."""
        self.damaged = True
        self._ask("count")

    def alive(self) -> bool:
        """Tell whether it still answers."""
        return self.process.poll() is None and self._ask("nothing") == {}

    def end(self) -> None:
        """End the process, whatever state it is in."""
        self.process.kill()
        self.process.communicate()

    def _ask(self, word: str) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PEER_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.end()
            raise AssertionError("the peer process gave no answer")
        answer: dict[str, object] = json.loads(line)
        return answer


class MemoryPeer:
    """A peer in this process's memory network."""

    damaged = True  # it belongs to one lab's network

    def __init__(self, network: MemoryNetwork, seed: int) -> None:
        self.data = seeded(seed, PEER_BYTES)
        self._network = network
        self._memory = self.data.copy()
        self._transport = MemoryTransport(network)
        self._transport.register([Region(self._memory.ctypes.data, PEER_BYTES)])
        self.description = self._transport.describe()
        self.address = self._memory.ctypes.data
        self._alive = True

    def kill(self) -> None:
        """Vanish from the network."""
        self._network.kill(self.description)
        self._alive = False

    def stop(self) -> None:
        """Stop answering."""
        self._network.stop(self.description)

    def go_on(self) -> None:
        """Answer again."""
        self._network.stop(self.description, False)

    def revoke(self) -> None:
        """Drop the serving side."""
        self._transport.revoke()
        self._memory[:] = 0

    def count(self) -> None:
        """Count up on a thread of its own."""
        threading.Thread(target=count_up, args=(self.address, self.alive), daemon=True).start()

    def alive(self) -> bool:
        """Tell whether it was not killed."""
        return self._alive

    def end(self) -> None:
        """Leave the network."""
        self._alive = False
        self._transport.shutdown()


class Pool:
    """Serving processes that outlive a test, because starting one takes seconds."""

    def __init__(self) -> None:
        self._idle: dict[str, list[ProcessPeer]] = {}
        self._started = 0

    def take(self, kind: str) -> ProcessPeer:
        """Return an idle peer, or start one in this environment."""
        idle = self._idle.setdefault(kind, [])
        if idle:
            return idle.pop()
        self._started += 1
        return ProcessPeer(kind.partition("-")[0], self._started)

    def give_back(self, kind: str, peer: ProcessPeer) -> None:
        """Keep a peer for the next test, or end it if something was done to it."""
        if peer.damaged or peer.process.poll() is not None:
            peer.end()
        else:
            self._idle.setdefault(kind, []).append(peer)

    def close(self) -> None:
        """End all."""
        for peers in self._idle.values():
            for peer in peers:
                peer.end()


def memory_lab(faults: bool) -> tuple[Lab, list[MemoryPeer]]:
    """Return a lab inside this process and its peers."""
    network = MemoryNetwork(STEP_BYTES)
    peers: list[MemoryPeer] = []

    def peer() -> Peer:
        peers.append(MemoryPeer(network, len(peers)))
        return peers[-1]

    def settle() -> None:
        for _ in range(PEER_BYTES // STEP_BYTES):
            network.step()

    reader: Transport = MemoryTransport(network)
    if faults:
        reader = FaultyTransport(reader, FaultPlan(), SystemClock())
    return Lab(reader, peer, settle), peers


def auto_over_tcp() -> AutoTransport:
    """Return an `auto` reader where the kernel does not let it read its neighbours."""

    def make(way: str) -> Transport:
        if way == "cma":
            raise TransportError("the kernel refuses")
        return make_transport(way)

    return AutoTransport("over-tcp", make=make)


@contextlib.contextmanager
def open_lab(kind: str, pool: Pool, set_environment: Callable[[str, str], None]) -> Iterator[Lab]:
    """Open the lab of one kind: `memory`, `faults` (a plan without faults), or a transport's name.

    `nixl` leaves UCX its choice, `nixl-tcp` does not; `auto-tcp` is an `auto` reader that cannot use cma.
    """
    if kind in ("memory", "faults"):
        lab, members = memory_lab(kind == "faults")
        try:
            yield lab
        finally:
            lab.reader.shutdown()
            for member in members:
                member.end()
        return
    if kind == "nixl-tcp":
        set_environment("UCX_TLS", "tcp")
        set_environment("UCX_NET_DEVICES", "lo")
    taken: list[ProcessPeer] = []

    def peer() -> Peer:
        taken.append(pool.take(kind))
        return taken[-1]

    settle_s, busy_s = (0.3, 5.0) if kind in QUIET else (1.0, 8.0)
    reader = auto_over_tcp() if kind == "auto-tcp" else make_transport(kind.partition("-")[0])
    lab = Lab(reader, peer, lambda: time.sleep(settle_s), busy_s, quiet=kind in QUIET)
    try:
        yield lab
    finally:
        lab.reader.shutdown()
        for used in taken:
            pool.give_back(kind, used)
