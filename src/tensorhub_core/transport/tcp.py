"""Move bytes over TCP with our own sockets: for systems without NIXL, and for links without RDMA.

The *serving* side has threads of its own, which send straight from the registered memory. The *reading* side has none:
it writes only inside `poll` and `wait`, on the thread that calls them. So a read that is closed early is quiet at once;
what that costs is its connection, which is made anew by the next `post`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub_core.clock import Clock, SystemClock
from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Region
from tensorhub_core.transport.description import decode_description, encode_description
from tensorhub_core.transport.extents import Extents, pack_regions
from tensorhub_core.transport.host import this_host
from tensorhub_core.transport.tcp_addresses import order_of_trying, share_loopback
from tensorhub_core.transport.tcp_memory import Vector, sound
from tensorhub_core.transport.tcp_reading import TcpConnection, TcpRead
from tensorhub_core.transport.tcp_serving import TcpServer
from tensorhub_core.transport.tcp_waiting import connect_first, wait_for_bytes
from tensorhub_core.transport.tcp_wire import MOST_RUNS, TcpOffer, decode_metadata, encode_metadata, encode_runs

_UNKNOWN = Progress(ReadState.FAILED, "the read is unknown: it was closed, or ended by a fence")


@dataclass(slots=True)
class _Peer:
    """An attached source: `regions` is what its last description lets be read."""

    agent: str
    secret: bytes
    regions: Extents
    connection: TcpConnection


@dataclass(slots=True)
class _Posted:
    """A read and its batch, which says where it writes."""

    read: TcpRead
    batch: Batch


class TcpTransport:
    """The data plane over TCP; see `Transport`. Only CPU memory. Nothing is listened on before `register`."""

    name = "tcp"
    fills_devices = False

    def __init__(
        self, token: str, *, interface: str | None = None, clock: Clock | None = None, connect_timeout_s: float = 3.0
    ) -> None:
        """Prepare a transport.

        `token` is drawn by chance once per transport, so that agents are never named twice (law L8). `interface` is
        the one network interface on which this side serves. `attach` takes up to `connect_timeout_s`.
        """
        self._prefix = f"tensorhub-{token}-{os.getpid()}"
        self._interface = interface
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._connect_timeout_s = connect_timeout_s
        self._pid = os.getpid()
        self._host = this_host()
        self._agents = 0
        self._attached = 0
        self._posted = 0
        self._unusable = ""
        self._regions: list[Region] = []
        self._local: list[Region] = []
        self._writable = Extents(())
        self._server: TcpServer | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._reads: dict[ReadId, _Posted] = {}

    def register(self, regions: Sequence[Region]) -> None:
        """Serve more regions; the first ones start the listener. Connections stay, also while reads are in flight."""
        self._check_usable()
        added = sound(regions)
        if not added:
            return
        if self._server is None:
            self._agents += 1
            self._server = TcpServer(f"{self._prefix}-serve{self._agents}", self._interface, self._clock)
        self._allow(self._regions + added)

    def register_local(self, regions: Sequence[Region]) -> None:
        """Let reads write to staging memory, which is not served."""
        self._check_usable()
        self._check_no_reads("staging memory cannot be replaced")
        self._local = sound(regions)
        self._writable = Extents(self._regions + self._local)

    def deregister(self) -> None:
        """Refuse all further requests of peers; the connections stay."""
        self._check_usable()
        self._check_no_reads("memory cannot be deregistered")
        self._local = []
        self._allow([])

    def describe(self) -> bytes:
        """Return where and under which secret the registered memory can be read.

        Raises TransportError before `register`. Who gets it can read the memory: it is for the hub's peers only.
        """
        self._check_usable()
        if self._server is None or not self._regions:
            raise TransportError("nothing is registered: register memory before describing it")
        server = self._server
        offer = TcpOffer(server.secret, self._host, server.endpoints, pack_regions(self._regions))
        return encode_description(self.name, server.agent, encode_metadata(offer))

    def attach(self, description: bytes) -> PeerId:
        """Connect to the first of the peer's addresses where it proves itself; one that is connected stays so.

        Raises TransportError, which names the addresses, after `connect_timeout_s` at the latest.
        """
        self._check_usable()
        found = decode_description(description, self.name)
        offer = decode_metadata(found.metadata)
        regions = Extents.unpack(offer.regions)
        known = self._known(found.agent)
        for other in self._peers.values():
            self._alive(other.connection)  # one that ended unseen gives its file back
        if known is None or self._peers[known].secret != offer.secret or not self._alive(self._peers[known].connection):
            groups = order_of_trying(offer.endpoints, share_loopback(self._host, offer.host))
            connection = connect_first(groups, found.agent, offer.secret, self._clock, self._connect_timeout_s)
            if known is not None:
                self.detach(known)
        else:
            connection = self._peers.pop(known).connection
        self._attached += 1
        peer = PeerId(f"{found.agent}#{self._attached}")
        self._peers[peer] = _Peer(found.agent, offer.secret, regions, connection)
        return peer

    def detach(self, peer: PeerId) -> None:
        """Close the connection to a peer; reads that are on their way from it fail."""
        self._check_usable()
        known = self._peers.pop(peer, None)
        if known is not None:
            known.connection.fail("the peer was detached")

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        """Send one request; does not block. A peer whose connection has ended is connected to anew, by `poll`.

        Raises TransportError also for more than 65,536 runs, and if the peer has 1,024 reads to answer.
        """
        self._check_usable()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"{peer!r} is not attached")
        self._check(known, batch)
        connection = known.connection
        if not self._alive(connection):
            timeout_s = self._connect_timeout_s
            connection = TcpConnection(connection.endpoint, known.agent, known.secret, self._clock, timeout_s)
            known.connection = connection
        read = TcpRead(Vector())
        read.vector.add_runs(batch.local, batch.length_bytes)
        connection.post(encode_runs(batch.remote, batch.length_bytes), read)
        self._posted += 1
        self._reads[ReadId(self._posted)] = _Posted(read, batch)
        return ReadId(self._posted)

    def poll(self, read: ReadId) -> Progress:
        """Receive what has arrived on the read's connection, up to a few MiB, and say where the read stands."""
        self._check_usable()
        posted = self._reads.get(read)
        if posted is None:
            return _UNKNOWN
        found = posted.read
        if found.progress.state is ReadState.ACTIVE and found.connection is not None:
            found.connection.drive()
            if found.progress.state is ReadState.ACTIVE:
                return found.connection.progress
        return found.progress

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Wait until the next read of a peer can end, or 4 MiB have come from one; a few milliseconds at most."""
        self._check_usable()
        posted = [self._reads.get(read) for read in reads]
        connections = {found.read.connection for found in posted if found is not None} - {None}
        if not wait_for_bytes([connection for connection in connections if connection is not None]):
            time.sleep(timeout_s)

    def close(self, read: ReadId) -> bool:
        """Forget a read; always quiet, because nothing but `poll` and `wait` writes.

        One that has not ended takes its connection along, so other reads from the same peer fail.
        """
        self._check_usable()
        posted = self._reads.pop(read, None)
        if posted is not None:
            self._abandon(posted, "another read from this peer was closed before it had ended: post again")
        return True

    def fence(self) -> None:
        """Close all connections of the reading side."""
        self._check_usable()
        self._drop_reader()

    def revoke(self) -> None:
        """End the listener, all connections of readers and their threads; then the memory may be freed.

        Also ends own reads that write to what was registered. Raises TransportError if a thread does not end.
        """
        self._check_usable()
        self._regions = []
        self._writable = Extents(self._local)
        for posted in list(self._reads.values()):
            batch = posted.batch
            if not self._writable.cover(batch.local, batch.length_bytes, batch.local_device):
                self._abandon(posted, "the memory that it writes to was revoked")
        self._drop_server()

    def shutdown(self) -> None:
        """End both sides."""
        if os.getpid() != self._pid or self._unusable:
            return
        try:
            self._drop_reader()
            self._drop_server()
        finally:
            self._unusable = self._unusable or "the transport was shut down"

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                "the process was forked after the transport was made: its threads do not survive that; connect again "
                "in the child"
            )
        if self._unusable:
            raise TransportError(self._unusable)

    def _check_no_reads(self, what: str) -> None:
        if self._reads:
            raise TransportError(f"{what} while a read is in flight: close all reads first")

    def _check(self, peer: _Peer, batch: Batch) -> None:
        runs = len(batch.local)
        if not runs == len(batch.remote) == len(batch.length_bytes) > 0:
            raise TransportError("a batch needs as many local as remote runs, and at least one")
        if runs > MOST_RUNS:
            raise TransportError(f"a batch has {runs:,} runs, over {MOST_RUNS:,}: post it in parts")
        if not self._writable.cover(batch.local, batch.length_bytes, batch.local_device):
            raise TransportError("a run lies outside the memory registered here")
        if not peer.regions.cover(batch.remote, batch.length_bytes, batch.remote_device):
            raise TransportError("a run lies outside the memory that the peer registered")

    def _allow(self, regions: list[Region]) -> None:
        self._regions = regions
        self._writable = Extents(regions + self._local)
        if self._server is not None:
            self._server.allowed = Extents(regions)

    def _known(self, agent: str) -> PeerId | None:
        return next((peer for peer, known in self._peers.items() if known.agent == agent), None)

    def _alive(self, connection: TcpConnection) -> bool:
        """Tell whether a connection can be used; one that is idle is looked at, for it may have ended unseen."""
        if connection.idle:
            connection.drive()
        return not connection.closed

    def _abandon(self, posted: _Posted, reason: str) -> None:
        read = posted.read
        if read.progress.state is ReadState.ACTIVE and read.connection is not None:
            read.connection.fail(reason)

    def _drop_reader(self) -> None:
        for peer in self._peers.values():
            peer.connection.fail("the reading side was fenced")
        self._peers.clear()
        self._reads.clear()

    def _drop_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        try:
            server.stop()
        except TransportError as error:
            self._unusable = str(error)
            raise
