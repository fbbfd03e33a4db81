"""Serve in every way that this machine should offer, and read each peer by the best way that both have.

`paths.py` ranks the ways; this carries it out. A way that refuses to attach, or whose first read from a peer fails, is
followed by the next one, as long as no byte can land any more. Reads of all ways are fenced together.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from tensorhub_core.errors import TransportError
from tensorhub_core.observe.log import get_logger
from tensorhub_core.transport.auto_members import Members, Surroundings, surroundings
from tensorhub_core.transport.base import Batch, PeerId, Progress, ReadId, ReadState, Region, Transport
from tensorhub_core.transport.description import AUTO, WAYS, Offer, decode_offer, encode_offer
from tensorhub_core.transport.extents import sound_regions
from tensorhub_core.transport.paths import Side, Way, forecast, line, rank, why_none

_MOST_REMEMBERED = 256
_T = TypeVar("_T")


@dataclass(slots=True)
class _Route:
    """A peer as one member knows it; `proven` once a read was done."""

    way: str
    peer: PeerId
    epoch: int
    proven: bool = False


@dataclass(slots=True)
class _Peer:
    """A peer, and how it is read: `chosen[True]` for memory of CPUs, `chosen[False]` where a device is involved."""

    offer: Offer
    chosen: dict[bool, _Route] = field(default_factory=dict)
    routes: dict[str, _Route] = field(default_factory=dict)


@dataclass(slots=True)
class _Read:
    """A read: `inner` is the member's, None once it has failed for good; `quiet` says what `close` answers then."""

    peer: _Peer
    batch: Batch
    route: _Route
    inner: ReadId | None
    tried: set[str] = field(default_factory=set)
    failed: bool = False
    error: str = ""
    quiet: bool = True


class AutoTransport:
    """The data plane that chooses; see `Transport`.

    `poll` blocks in one case: where the first read from a peer failed, it attaches the peer by the next way.
    """

    name = AUTO

    def __init__(
        self, token: str, *, make: Callable[[str], Transport], around: Callable[[], Surroundings] = surroundings
    ) -> None:
        """Prepare a transport; `make` makes its members, when they are needed.

        `token` is drawn by chance once per transport, so that agents are never named twice. Raises TransportError, with
        every reason, if none of the ways works here.
        """
        self._members = Members(make, around())
        self._prefix = f"tensorhub-{token}-{os.getpid()}"
        self._pid = os.getpid()
        self._agents = self._attached = self._posted = 0
        self._agent = ""
        self._peers: dict[PeerId, _Peer] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._suspects: OrderedDict[str, set[str]] = OrderedDict()
        self._said: OrderedDict[str, str] = OrderedDict()
        self._poisoned = False
        self._closed = False

    @property
    def fills_devices(self) -> bool:
        """Tell whether RDMA may carry bytes from a CPU's memory into a device's."""
        return self._members.around.rdma

    @property
    def reason(self) -> str:
        """Say in one line what will be chosen for memory of CPUs."""
        around = self._members.around
        within, between = forecast(Side(frozenset(self._members.ways(devices=False)), around.host, around.rdma))
        return f"{within.transport} within this machine, {between.transport} between machines ({between.reason})"

    def register(self, regions: Sequence[Region]) -> None:
        """Serve more regions in every way that should; raises TransportError if none can.

        Memory of a device needs NIXL. A way that cannot serve a CPU's is left out, with a warning, if another can.
        """
        self._check_usable()
        self._check_no_reads("memory cannot be registered")
        added = sound_regions(regions)
        if not added:
            return
        first = not self._members.regions
        self._members.register(added)
        if first:
            self._agents += 1
            self._agent = f"{self._prefix}-auto{self._agents}"

    def register_local(self, regions: Sequence[Region]) -> None:
        """Let reads of every member write to staging memory."""
        self._check_usable()
        self._check_no_reads("staging memory cannot be replaced")
        self._members.set_local(sound_regions(regions))

    def deregister(self) -> None:
        """Forget all regions in every member."""
        self._check_usable()
        self._check_no_reads("memory cannot be deregistered")
        self._members.deregister()

    def describe(self) -> bytes:
        """Return the descriptions of all members that serve something."""
        self._check_usable()
        descriptions = self._members.descriptions()
        if not descriptions:
            raise TransportError("nothing is registered: register memory before describing it")
        around = self._members.around
        return encode_offer(self._agent, around.host, around.rdma, descriptions)

    def attach(self, description: bytes) -> PeerId:
        """Attach by the best way that works; raises TransportError with the reason of each that does not."""
        self._check_usable()
        peer = _Peer(decode_offer(description))
        for older in [known for known, other in self._peers.items() if other.offer.agent == peer.offer.agent]:
            self.detach(older)
        regions = self._members.regions
        cpu = all(region.device == "cpu" for region in regions)
        try:
            self._connect(peer, cpu)
        except TransportError:
            if cpu or not any(region.device == "cpu" for region in [*regions, *self._members.local]):
                raise
            self._connect(peer, True)  # its bytes go to the device through the host's staging memory
        self._attached += 1
        name = PeerId(f"{peer.offer.agent}#{self._attached}")
        self._peers[name] = peer
        return name

    def detach(self, peer: PeerId) -> None:
        """Detach a peer from the members that know it."""
        self._check_usable()
        found = self._peers.pop(peer, None)
        for route in () if found is None else found.routes.values():
            self._members[route.way].transport.detach(route.peer)  # also if it may have been lost: or it stays for good

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        """Post a read with the member that reads memory of this kind from this peer."""
        self._check_usable()
        if self._poisoned:
            raise TransportError("a read was closed before it had ended: fence() first")
        found = self._peers.get(peer)
        if found is None:
            raise TransportError(f"{peer!r} is not attached")
        route = found.chosen.get(_of_cpus(batch))
        if route is None or route.epoch != self._members[route.way].epoch:
            route = self._connect(found, _of_cpus(batch))
        self._posted += 1
        self._reads[ReadId(self._posted)] = _Read(found, batch, route, self._launch(route, batch))
        return ReadId(self._posted)

    def poll(self, read: ReadId) -> Progress:
        """Say where a read stands; a first read that failed goes on in the next way."""
        self._check_usable()
        found = self._reads.get(read)
        if found is None:
            return Progress(ReadState.FAILED, "the read is unknown: it was closed, or ended by a fence")
        if found.inner is None:
            return Progress(ReadState.FAILED, found.error)
        progress = self._members[found.route.way].transport.poll(found.inner)
        if progress.state is ReadState.DONE:
            found.route.proven = True
        elif progress.state is ReadState.FAILED:
            found.failed = True
            if not found.route.proven:
                return self._fall_back(found, progress)
        return progress

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Wait as the reads' way does, if they have the same."""
        self._check_usable()
        known = [self._reads.get(read) for read in reads]
        ways = {found.route.way if found is not None and found.inner is not None else "" for found in known}
        if len(ways) != 1 or "" in ways:
            time.sleep(timeout_s)
        else:
            inner = [found.inner for found in known if found is not None and found.inner is not None]
            self._members[ways.pop()].transport.wait(inner, timeout_s)

    def close(self, read: ReadId) -> bool:
        """Forget a read; quiet if its member says so."""
        self._check_usable()
        found = self._reads.pop(read, None)
        if found is None:
            return True
        quiet = found.quiet if found.inner is None else self._end(found)
        self._poisoned = self._poisoned or not quiet
        # The kernel may let a neighbour's memory be read in part: what a driver has pinned, it may not.
        doubtful = not found.route.proven or found.route.way == "cma"
        if doubtful and (found.failed or not quiet):
            _remember(self._suspects, found.peer.offer.agent, {found.route.way})
        return quiet

    def fence(self) -> None:
        """Fence every member, also when one of them cannot be; raises TransportError afterwards."""
        self._check_usable()
        self._reads.clear()
        self._peers.clear()
        self._members.fence()
        self._poisoned = False

    def revoke(self) -> None:
        """Drop the serving side of every member."""
        self._check_usable()
        self._members.revoke()

    def shutdown(self) -> None:
        """End every member."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._members.shutdown()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError("the process was forked after the transport was made: connect again in the child")
        if self._closed:
            raise TransportError("the transport was shut down")

    def _check_no_reads(self, what: str) -> None:
        if self._reads or self._poisoned:
            raise TransportError(f"{what} while a read is in flight: close all reads and fence() first")

    def _connect(self, peer: _Peer, cpu: bool, tried: Set[str] = frozenset()) -> _Route:
        """Attach a peer by the best way that was not tried; raises TransportError with the reason of each."""
        refusals = []
        for way in self._ranked(peer, cpu, tried):
            try:
                route = self._attach(peer, way.transport)
            except TransportError as error:
                refusals.append(f"{way.transport}: {error}")
                continue
            peer.chosen[cpu] = route
            said = line(peer.offer.agent, way, refusals)
            if self._said.get(peer.offer.agent) != said:
                get_logger("transport").info("%s", said)
                _remember(self._said, peer.offer.agent, said)
            return route
        raise TransportError("; ".join(refusals) or why_none(*self._sides(peer), cpu=cpu))

    def _sides(self, peer: _Peer) -> tuple[Side, Side]:
        around, offer = self._members.around, peer.offer
        return Side(frozenset(WAYS), around.host, around.rdma), Side(offer.descriptions.keys(), offer.host, offer.rdma)

    def _ranked(self, peer: _Peer, cpu: bool, tried: Set[str]) -> list[Way]:
        suspects = self._suspects.pop(peer.offer.agent, set())
        ranked = rank(*self._sides(peer), cpu=cpu, suspects=suspects)
        return [way for way in ranked if way.transport not in tried]

    def _attach(self, peer: _Peer, way: str) -> _Route:
        member = self._members[way]
        known = peer.routes.get(way)
        if known is not None and known.epoch == member.epoch:
            return known
        self._members.sync(way)
        try:
            attached = member.transport.attach(peer.offer.descriptions[way])
        except TransportError:
            # It may have lost its peers by that, unless it had reads to keep.
            member.epoch += 0 if member.open_reads else 1
            raise
        peer.routes[way] = _Route(way, attached, member.epoch)
        return peer.routes[way]

    def _launch(self, route: _Route, batch: Batch) -> ReadId:
        member = self._members[route.way]
        inner = member.transport.post(route.peer, batch)
        member.open_reads += 1
        return inner

    def _end(self, read: _Read) -> bool:
        """Close the member's read; return whether it is quiet."""
        assert read.inner is not None
        member = self._members[read.route.way]
        member.open_reads -= 1
        inner, read.inner = read.inner, None
        return member.transport.close(inner)

    def _fall_back(self, read: _Read, failed: Progress) -> Progress:
        """Go on in the next way, if there is one and nothing of the failed read can land any more."""
        member = self._members[read.route.way]
        read.tried.add(read.route.way)
        if member.open_reads > 1 or not self._ranked(read.peer, _of_cpus(read.batch), read.tried):
            return failed
        way, read.error = read.route.way, failed.error
        if not self._end(read):
            member.epoch += 1
            try:
                member.transport.fence()
            except Exception as error:
                read.quiet, read.error = False, f"{failed.error}; and it could not be fenced: {error}"
                return Progress(ReadState.FAILED, read.error)
        try:
            read.route = self._connect(read.peer, _of_cpus(read.batch), read.tried)
            read.inner = self._launch(read.route, read.batch)
        except TransportError as error:
            read.error = f"{way}: {failed.error}; {error}"
            return Progress(ReadState.FAILED, read.error)
        return Progress(ReadState.ACTIVE)


def _remember(memory: OrderedDict[str, _T], key: str, value: _T) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > _MOST_REMEMBERED:
        memory.popitem(last=False)


def _of_cpus(batch: Batch) -> bool:
    return batch.local_device == "cpu" == batch.remote_device
