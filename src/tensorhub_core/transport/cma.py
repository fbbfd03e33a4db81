"""Read a peer's memory on the same machine, without its help: process_vm_readv ("cross memory attach").

Nothing runs at the source. What keeps a reader from memory that is no longer served is a *nonce*, 16 random bytes in
the source's memory: every system call reads it behind the data. `revoke()` overwrites it before memory may be freed.
So bytes count only if the nonce was still right after they were read; a call that was in flight meanwhile finds the
nonce changed, and its bytes are thrown away. Another process that got the number of the source's, and a source that
runs another program, fail in the same way. A stale read cannot harm the process that it reads.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Region
from tensorhub_core.transport.description import decode_description, encode_description
from tensorhub_core.transport.extents import Extents, pack_regions, sound_regions
from tensorhub_core.transport.host import Host, start_ticks, this_host
from tensorhub_core.transport.parts import split
from tensorhub_core.transport.process_memory import MOST_RUNS, ProcessMemory, iovecs

_NONCE_BYTES = 16
_ADDRESS_LIMIT = 2**64 - _NONCE_BYTES
_MOST_THREADS = 4
_LEAST_PART_BYTES = 1 << 20
"""A part that is worth handing to another thread."""
_ERRORS = {
    errno.ESRCH: "its process is gone",
    errno.EFAULT: "its memory is no longer there, or the memory here is not",
    errno.EPERM: (
        "the kernel does not let this process read it: run both as the same user and in the same container, or give "
        "the reader CAP_SYS_PTRACE (`sysctl kernel.yama.ptrace_scope` must be 0 or 1), or use transport='tcp'"
    ),
}


class Serving(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a serving side is, how it proves itself, and what may be read there."""

    host: Host
    pid: int
    start_ticks: int
    nonce_address: int
    nonce: bytes
    regions: bytes


@dataclass(frozen=True, slots=True)
class _Peer:
    """An attached peer."""

    agent: str
    serving: Serving
    extents: Extents


class _Nonce:
    """The proof that this side still serves, in a page of its own that goes with this object."""

    def __init__(self) -> None:
        # Private: a forked child that shuts down must not change the parent's.
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self.value = b""
        self.renew()

    def renew(self) -> None:
        """Draw another one: what was described before proves nothing any more."""
        self.value = secrets.token_bytes(_NONCE_BYTES)
        self._page[:_NONCE_BYTES] = self.value


class CmaTransport:
    """The data plane between processes of one machine; see `Transport`. Only CPU memory.

    A read is done when `post` returns, and every read is quiet.
    """

    name = "cma"
    fills_devices = False

    def __init__(self, token: str, *, threads: int | None = None) -> None:
        """Prepare a transport; `token` is drawn by chance once per transport, so that agents are never named twice.

        Large batches are copied by up to `threads` threads (None = half of the CPUs, at most 4): one alone does not
        use what memory can give, and the others have checksums to compute.
        Raises TransportError where the kernel has no such call, or forbids it.
        """
        self._memory = ProcessMemory()
        host, started = this_host(), start_ticks(os.getpid())
        if host is None or started is None:
            raise TransportError("the cma transport needs /proc to tell processes apart: use transport='tcp'")
        self._host, self._started = host, started
        self._prefix = f"tensorhub-{token}-{os.getpid()}"
        self._pid = os.getpid()
        self._nonce = _Nonce()
        self._threads = threads or max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._copiers = ThreadPoolExecutor(max(1, self._threads - 1), thread_name_prefix="tensorhub-cma")
        self._agents = 0
        self._agent = ""
        self._attached = 0
        self._posted = 0
        self._regions: list[Region] = []
        self._local: list[Region] = []
        self._writable = Extents(())
        self._peers: dict[PeerId, _Peer] = {}
        self._reads: dict[ReadId, Progress] = {}
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        """Serve more regions; what was described before can be read as before."""
        self._check_usable()
        added = sound_regions(regions, "the cma transport moves only CPU memory")
        if not added:
            return
        if not self._regions:
            self._agents += 1
            self._agent = f"{self._prefix}-cma{self._agents}"
            self._memory.allow_neighbours()
        self._regions += added
        self._writable = Extents(self._regions + self._local)

    def register_local(self, regions: Sequence[Region]) -> None:
        """Let reads write to staging memory."""
        self._check_usable()
        self._local = sound_regions(regions, "the cma transport moves only CPU memory")
        self._writable = Extents(self._regions + self._local)

    def deregister(self) -> None:
        """Serve nothing more: the nonce changes."""
        self._check_usable()
        self._local = []
        self._revoke()

    def describe(self) -> bytes:
        """Return this process's number, the nonce and where it lies, and the regions."""
        self._check_usable()
        if not self._regions:
            raise TransportError("nothing is registered: register memory before describing it")
        nonce, regions = self._nonce, pack_regions(self._regions)
        serving = Serving(self._host, self._pid, self._started, nonce.address, nonce.value, regions)
        return encode_description(self.name, self._agent, msgspec.msgpack.encode(serving))

    def attach(self, description: bytes) -> PeerId:
        """Find the peer's process and prove by its nonce that it is the one and may be read."""
        self._check_usable()
        found = decode_description(description, self.name)
        peer = _Peer(found.agent, *_decode(found.metadata))
        self._check_here(peer.serving)
        nothing = np.zeros(0, np.uint64)
        error = self._copy(peer, Batch(nothing, nothing, nothing))
        if error:
            replaced = start_ticks(peer.serving.pid) not in (peer.serving.start_ticks, None)
            raise TransportError(f"{error}: its number is another process's now" if replaced else error)
        for older in [known for known, other in self._peers.items() if other.agent == peer.agent]:
            del self._peers[older]
        self._attached += 1
        name = PeerId(f"{peer.agent}#{self._attached}")
        self._peers[name] = peer
        return name

    def detach(self, peer: PeerId) -> None:
        """Forget a peer."""
        self._check_usable()
        self._peers.pop(peer, None)

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        """Copy all runs; blocks while the kernel copies."""
        self._check_usable()
        found = self._peers.get(peer)
        if found is None:
            raise TransportError(f"{peer!r} is not attached")
        if not len(batch.local) == len(batch.remote) == len(batch.length_bytes) > 0:
            raise TransportError("a batch needs as many local as remote runs, and at least one")
        if not self._writable.cover(batch.local, batch.length_bytes, batch.local_device):
            raise TransportError("a run lies outside the memory registered here")
        if not found.extents.cover(batch.remote, batch.length_bytes, batch.remote_device):
            raise TransportError("a run lies outside the memory that the peer registered")
        parts = split(batch, self._threads, _LEAST_PART_BYTES) if self._threads > 1 else [batch]
        error = self._copy_all(found, batch) if len(parts) == 1 else self._copy_parts(found, batch, parts)
        self._posted += 1
        self._reads[ReadId(self._posted)] = Progress(ReadState.FAILED if error else ReadState.DONE, error)
        return ReadId(self._posted)

    def poll(self, read: ReadId) -> Progress:
        """Say how the read went."""
        self._check_usable()
        return self._reads.get(read) or Progress(
            ReadState.FAILED, "the read is unknown: it was closed, or ended by a fence"
        )

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Wait: a read has ended when `post` returns."""
        time.sleep(timeout_s)

    def close(self, read: ReadId) -> bool:
        """Forget a read; always quiet."""
        self._check_usable()
        self._reads.pop(read, None)
        return True

    def fence(self) -> None:
        """Forget all reads and peers."""
        self._check_usable()
        self._reads.clear()
        self._peers.clear()

    def revoke(self) -> None:
        """Overwrite the nonce: no read of a peer is done any more, whatever becomes of the memory."""
        self._check_usable()
        self._revoke()

    def shutdown(self) -> None:
        """Revoke, and forget everything."""
        if self._closed or os.getpid() != self._pid:
            return
        self.fence()
        self._revoke()
        self._copiers.shutdown()
        self._closed = True

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                "the process was forked after the transport was made: its memory is another one; connect again in the "
                "child"
            )
        if self._closed:
            raise TransportError("the transport was shut down")

    def _revoke(self) -> None:
        self._nonce.renew()
        self._regions = []
        self._writable = Extents(self._local)

    def _check_here(self, there: Serving) -> None:
        """Raise TransportError unless the process may be one that this side can see."""
        here = self._host
        if there.host.boot_id != here.boot_id:
            raise TransportError("the peer is on another machine: cma works within one; use transport='tcp' or 'auto'")
        if there.host.pid_namespace != here.pid_namespace:
            raise TransportError(
                "the peer is in another container: its process cannot be named from here; let both share a PID "
                "namespace, or use transport='tcp' or 'auto'"
            )

    def _copy_parts(self, peer: _Peer, batch: Batch, parts: Sequence[Batch]) -> str:
        """Read the parts of a batch by several threads; whatever happens, none of them writes any more afterwards."""
        try:
            others = [self._copiers.submit(self._copy_all, peer, part) for part in parts[1:]]
            errors = [self._copy_all(peer, parts[0]), *(other.result() for other in others)]
        except BaseException as error:
            # A part that could not be given to a thread is queued nevertheless.
            self._copiers.shutdown(cancel_futures=True)
            self._threads = 1
            if not isinstance(error, RuntimeError):
                raise
            return self._copy_all(peer, batch)  # the system allows no more threads
        return next(filter(None, errors), "")

    def _copy_all(self, peer: _Peer, batch: Batch) -> str:
        """Read the runs, as many system calls as they need; return what went wrong first, or an empty text."""
        most = MOST_RUNS - 1
        for begin in range(0, len(batch.local), most):
            part = slice(begin, begin + most)
            error = self._copy(peer, Batch(batch.local[part], batch.remote[part], batch.length_bytes[part]))
            if error:
                return error
        return ""

    def _copy(self, peer: _Peer, batch: Batch) -> str:
        """Read the runs of one system call and then the nonce; return what went wrong, or an empty text."""
        count = len(batch.local) + 1
        found, serving = np.zeros(_NONCE_BYTES, np.uint8), peer.serving
        here, there = iovecs(count, found), np.empty((count, 2), np.uint64)
        here[:-1, 0], here[:-1, 1] = batch.local, batch.length_bytes
        there[:-1, 0], there[:, 1] = batch.remote, here[:, 1]
        there[-1, 0] = serving.nonce_address
        code = self._memory.read(serving.pid, here, there)
        if code:
            return f"process {serving.pid} cannot be read: {_ERRORS.get(code) or os.strerror(code)}"
        if found.tobytes() != serving.nonce:
            return f"process {serving.pid} no longer serves this memory"
        return ""


def _decode(metadata: bytes) -> tuple[Serving, Extents]:
    """Decode what a peer said about itself; raises TransportError."""
    try:
        serving = msgspec.msgpack.decode(metadata, type=Serving)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransportError(f"a peer's description cannot be read: {error}") from None
    if len(serving.nonce) != _NONCE_BYTES or not 0 < serving.nonce_address <= _ADDRESS_LIMIT:
        raise TransportError("a peer's description proves nothing")
    if not 0 < serving.pid < 1 << 31:
        raise TransportError(f"a peer's description names process {serving.pid}, which cannot exist")
    return serving, Extents.unpack(serving.regions)
