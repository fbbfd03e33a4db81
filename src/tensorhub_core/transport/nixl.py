"""Move bytes with NIXL: RDMA and GPU memory on clusters, shared memory and TCP through UCX elsewhere.

Two agents that live apart (law L9). The *serving* agent has a progress thread and holds what peers read. The *reader*
agent has none: the thread that polls drives it, and nothing else does. NIXL cannot abort a transfer, so the reader is
thrown away at every fence, and a new one is made, under a new name, when it is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorhub_core.clock import Clock, SystemClock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Region
from tensorhub_core.transport.description import decode_description, encode_description
from tensorhub_core.transport.extents import sound_regions
from tensorhub_core.transport.interface import addresses_of
from tensorhub_core.transport.nixl_agent import NixlAgent, describe, load_bindings

_DRAIN_PAUSE_S = 0.0005


@dataclass(slots=True)
class _Read:
    """A posted read: `handle` is NIXL's."""

    handle: int
    progress: Progress


class NixlTransport:
    """The data plane over NIXL; see `Transport`. Nothing is loaded or started before the first call needs it."""

    name = "nixl"
    fills_devices = True

    def __init__(
        self, token: str, *, interface: str | None = None, drain_s: float = 1.0, clock: Clock | None = None
    ) -> None:
        """Prepare a transport.

        `token` is drawn by chance once per transport, so that agents are never named twice (law L8). `interface` is
        the one network interface to use. A fence first gives reads up to `drain_s` to end: UCX's TCP kills the process
        of a source that answers a reader which has gone, so one that still answers is waited for. Raises TransportError
        if NIXL is not installed.
        """
        self._nixl = load_bindings()
        self._prefix = f"tensorhub-{token}-{os.getpid()}"
        self._interface = interface
        self._drain_s = drain_s
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._pid = os.getpid()
        self._agents = 0
        self._attached = 0
        self._posted = 0
        self._unusable = ""
        self._regions: list[Region] = []
        self._local: list[Region] = []
        self._serving: NixlAgent | None = None
        self._serving_handles: list[Any] = []
        self._reader: NixlAgent | None = None
        self._reader_handles: list[Any] = []
        self._reader_local: list[Any] = []
        self._peers: dict[PeerId, str] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._abandoned: list[_Read] = []

    def register(self, regions: Sequence[Region]) -> None:
        """Register regions with the serving agent and, if there is one, the reader."""
        self._check_usable()
        self._check_no_reads("memory cannot be registered")
        added = sound_regions(regions)
        if not added:
            return
        try:
            if self._serving is None:
                self._serving = self._make_agent("serve", progress_thread=True)
            self._serving_handles += self._serving.register(added)
            if self._reader is not None:
                self._reader_handles += self._reader.register(added)
        except TransportError:
            self._replace_spoilt()
            raise
        self._regions += added

    def register_local(self, regions: Sequence[Region]) -> None:
        """Register staging memory with the reader only."""
        self._check_usable()
        self._check_no_reads("staging memory cannot be replaced")
        local = sound_regions(regions)
        if self._reader is not None:
            try:
                handles = self._reader.register(local)
            except TransportError:
                self._drop_reader()
                raise
            self._reader.deregister(self._reader_local)
            self._reader_local = handles
        self._local = local

    def deregister(self) -> None:
        """Deregister everything at both agents, which live on."""
        self._check_usable()
        self._check_no_reads("memory cannot be deregistered")
        if self._serving is not None:
            self._serving.deregister(self._serving_handles)
        if self._reader is not None:
            self._reader.deregister([*self._reader_handles, *self._reader_local])
        self._serving_handles, self._reader_handles, self._reader_local = [], [], []
        self._regions, self._local = [], []

    def describe(self) -> bytes:
        """Return the serving agent's name and metadata; raises TransportError before `register`."""
        self._check_usable()
        if self._serving is None or not self._regions:
            raise TransportError("nothing is registered: register memory before describing it")
        places = addresses_of(self._interface)
        return encode_description(self.name, self._serving.name, self._serving.metadata(), places)

    def attach(self, description: bytes) -> PeerId:
        """Load the peer's metadata into the reader; does not wait for an answer: the first read tells."""
        self._check_usable()
        found = decode_description(description, self.name)
        reader = self._reading_side()
        for peer in [peer for peer, agent in self._peers.items() if agent == found.agent]:
            self.detach(peer)
        try:
            named = reader.add_peer(found.metadata)
        except TransportError:
            # A load that fails half-way leaves a name in the agent that cannot be taken out again.
            if not self._reads and not self._abandoned:
                self._drop_reader()
            raise
        if named != found.agent:
            reader.remove_peer(named)
            raise TransportError(f"the description of agent {found.agent!r} is that of {named!r}")
        self._attached += 1
        peer = PeerId(f"{named}#{self._attached}")
        self._peers[peer] = named
        return peer

    def detach(self, peer: PeerId) -> None:
        """Disconnect the reader from a peer."""
        self._check_usable()
        agent = self._peers.pop(peer, None)
        if agent is not None and self._reader is not None:
            self._reader.remove_peer(agent)

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        """Post one NIXL transfer with one descriptor per run."""
        self._check_usable()
        if self._abandoned:
            raise TransportError("a read was closed before it had ended: fence() first")
        agent = self._peers.get(peer)
        if agent is None or self._reader is None:
            raise TransportError(f"{peer!r} is not attached")
        read = _Read(self._reader.start_read(agent, batch), Progress(ReadState.ACTIVE))
        self._posted += 1
        self._reads[ReadId(self._posted)] = read
        try:
            if self._reader.post(read.handle):
                read.progress = Progress(ReadState.DONE)
        except Exception as error:
            # Some of its runs may be on the way: only a fence makes sure.
            read.progress = Progress(ReadState.FAILED, describe(error))
        return ReadId(self._posted)

    def poll(self, read: ReadId) -> Progress:
        """Drive the reader and say where a read stands."""
        self._check_usable()
        found = self._reads.get(read)
        if found is None:
            return Progress(ReadState.FAILED, "the read is unknown: it was closed, or ended by a fence")
        self._update(found)
        return found.progress

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Wait: only polling moves bytes of TCP, and nothing tells when others have come."""
        time.sleep(timeout_s)

    def close(self, read: ReadId) -> bool:
        """Forget a read; quiet only if it was done, because a failed transfer may still have runs on the way."""
        self._check_usable()
        found = self._reads.pop(read, None)
        if found is None:
            return True
        if found.progress.state is ReadState.DONE and self._reader is not None:
            self._reader.release(found.handle)
            return True
        self._abandoned.append(found)
        return False

    def fence(self) -> None:
        """Wait shortly for unfinished reads, then destroy the reader; the next `attach` makes a new one."""
        self._check_usable()
        self._drain()
        self._drop_reader()

    def revoke(self) -> None:
        """Destroy the serving agent and forget what it served."""
        self._check_usable()
        handles, self._serving_handles, self._regions = self._reader_handles, [], []
        self._reader_handles = []
        self._drop_serving()
        if self._reader is not None:
            self._reader.deregister(handles)

    def shutdown(self) -> None:
        """Destroy both agents."""
        if os.getpid() != self._pid or self._unusable:
            return
        try:
            self._drain()
            self._drop_reader()
            self._drop_serving()
        finally:
            self._unusable = self._unusable or "the transport was shut down"

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                "the process was forked after the transport was made: agents do not survive that; connect again in "
                "the child"
            )
        if self._unusable:
            raise TransportError(self._unusable)

    def _check_no_reads(self, what: str) -> None:
        if self._reads or self._abandoned:
            raise TransportError(f"{what} while a read is in flight: close all reads and fence() first")

    def _make_agent(self, role: str, *, progress_thread: bool) -> NixlAgent:
        self._agents += 1
        name = f"{self._prefix}-{role}{self._agents}"
        return NixlAgent(self._nixl, name, progress_thread=progress_thread, interface=self._interface)

    def _reading_side(self) -> NixlAgent:
        if self._reader is None:
            reader = self._make_agent("read", progress_thread=False)
            self._reader_handles = reader.register(self._regions)
            self._reader_local = reader.register(self._local)
            self._reader = reader
        return self._reader

    def _replace_spoilt(self) -> None:
        """After a failed registration make both sides anew with what was registered before."""
        self._drop_serving()
        self._drop_reader()
        self._serving_handles = []
        if self._regions:
            self._serving = self._make_agent("serve", progress_thread=True)
            self._serving_handles = self._serving.register(self._regions)

    def _update(self, read: _Read) -> None:
        if read.progress.state is not ReadState.ACTIVE or self._reader is None:
            return
        try:
            if self._reader.done(read.handle):
                read.progress = Progress(ReadState.DONE)
        except Exception as error:
            read.progress = Progress(ReadState.FAILED, describe(error))

    def _drain(self) -> None:
        unfinished = [*self._reads.values(), *self._abandoned]
        end = self._clock.now() + self._drain_s
        while True:
            for read in unfinished:
                self._update(read)
            unfinished = [read for read in unfinished if read.progress.state is ReadState.ACTIVE]
            if not unfinished or self._clock.now() >= end:
                return
            time.sleep(_DRAIN_PAUSE_S)

    def _drop_reader(self) -> None:
        reader, self._reader = self._reader, None
        reads = [*self._reads.values(), *self._abandoned]
        self._peers.clear()
        self._reader_handles, self._reader_local = [], []
        if reader is None:
            return
        for read in reads:
            reader.release(read.handle)
        self._destroy(reader)
        self._reads.clear()
        self._abandoned.clear()

    def _drop_serving(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            self._destroy(serving)

    def _destroy(self, agent: NixlAgent) -> None:
        try:
            agent.destroy()
        except TransportError as error:
            self._unusable = str(error)
            raise
