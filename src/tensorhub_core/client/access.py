"""Fetch and check the blobs that describe a leased source: from anyone, so they are believed only after validation."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.prefix_word import WORD_BYTES, tag_of
from tensorhub_core.client.reading import SourceAccess
from tensorhub_core.client.sums import unpack_first_sums, unpack_sums
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import DeadlineExceeded, LayoutMismatch, StateError, TensorHubError, TransportError
from tensorhub_core.ids import Digest
from tensorhub_core.layout.canonical import decode_layout, digest_of
from tensorhub_core.layout.casting import NOT_AGAIN, Cast
from tensorhub_core.layout.cuts import ExactPolicy
from tensorhub_core.layout.planner import Planner
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable, segment_table
from tensorhub_core.layout.types import Layout, Placement
from tensorhub_core.state.messages import Blob, GetBlob, Reply, Request, Source
from tensorhub_core.transport.description import AUTO, no_way, ways_of

Call = Callable[[Request, Deadline], Reply]
_CACHED_BYTES = 64 << 20
_CACHED_LAYOUTS = 8
_TRIES = 5
_PAUSE_S = 0.2
"""A worker that came back after a restart of the server uploads its blobs right after its hello: they may be a moment
behind its promise."""


class SourceFault(Exception):
    """A source cannot be described: another one has to be found. `lease` names it."""

    def __init__(self, lease: str, error: TensorHubError) -> None:
        super().__init__(str(error))
        self.lease = lease
        self.error = error


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A validated layout with its segments."""

    layout: Layout
    table: SegmentTable


class SourceBook:
    """Describe leased sources to the executor; keeps what it fetched, bounded, and plans. One thread at a time.

    `cast`: which dtypes the worker converts.
    """

    def __init__(self, call: Call, transport: str, cast: Cast = False) -> None:
        self._cast, self._planner = cast, Planner()
        self._call = call
        self._transport = transport
        self._most_layouts = _CACHED_LAYOUTS
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()
        self._layouts: OrderedDict[bytes, KnownLayout] = OrderedDict()
        self._bytes = 0

    def know(self, digest: Digest, layout: Layout, table: SegmentTable) -> None:
        """Remember the worker's own layout: it needs not be fetched."""
        self._remember_layout(digest, KnownLayout(layout, table))

    def learn(self, blobs: Iterable[bytes]) -> None:
        """Remember blobs that came with a promise: they are known by their contents, so they need no check."""
        for data in blobs:
            self._remember(digest_of(data), data)

    def plan(
        self,
        own: Layout,
        table: SegmentTable,
        accesses: Sequence[SourceAccess],
        exact: Sequence[ExactPolicy | None],
    ) -> ReadPlan:
        """Plan how memory of the layout `own` is filled from what was described; raises what `plan_read` raises."""
        layouts, sums = [access.layout for access in accesses], [access.sums for access in accesses]
        return self._planner.plan(own, layouts, sums, table, exact, self.casts(accesses))

    def casts(self, accesses: Sequence[SourceAccess]) -> list[Cast]:
        """Return which dtypes of each source may be converted."""
        return [NOT_AGAIN if access.converted else self._cast for access in accesses]

    def access(
        self,
        sources: Sequence[Source],
        prefixes: dict[str, int],
        deadline: Deadline,
        known: Mapping[str, bytes] | None = None,
    ) -> list[SourceAccess]:
        """Return what the executor needs of each source; raises SourceFault, or the error of a lost server.

        `prefixes` holds, per lease, how many segments of a source that is not whole may be read; `known` the packed
        checksums that were heard of sources without a manifest.
        """
        # What one read needs is kept for the next one, and the worker's own layout.
        self._most_layouts = max(_CACHED_LAYOUTS, 1 + len({source.layout for source in sources}))
        heard = {source.lease: (known or {}).get(source.lease, source.known) for source in sources}
        return [self._access(each, prefixes.get(each.lease), heard[each.lease], deadline) for each in sources]

    def _access(self, source: Source, prefix: int | None, heard: bytes, deadline: Deadline) -> SourceAccess:
        try:
            known = self._layout(source.layout, deadline)
            if (known.layout.shard, known.layout.num_shards) != (source.shard, source.num_shards):
                raise LayoutMismatch(f"the layout of {source.replica}/{source.shard} is that of another shard")
            placement = decode_placement(self._blob(source.placement, deadline), known, self._transport)
            if source.partial:
                sums = unpack_first_sums(heard, known.table)
            else:
                sums = unpack_sums(self._blob(source.sums, deadline), known.table)
        except (LayoutMismatch, StateError) as error:
            raise SourceFault(source.lease, error) from None
        except TensorHubError as error:
            if isinstance(error, DeadlineExceeded) or error.code == "server_unreachable":
                raise
            raise SourceFault(source.lease, error) from None
        known_sums = len(heard) // 8 if source.partial else None
        readable = min(length for length in (prefix, known_sums, len(sums)) if length is not None)
        return SourceAccess(
            lease=source.lease,
            replica=source.replica,
            description=placement.agent,
            layout=known.layout,
            table=known.table,
            addresses=placement.addresses,
            devices=placement.devices,
            sums=sums,
            prefix=readable,
            converted=source.converted,
            known=known_sums,
            word=0 if source.partial else placement.word,
            tag=tag_of(source.sums),
        )

    def _layout(self, digest: bytes, deadline: Deadline) -> KnownLayout:
        known = self._layouts.get(digest)
        if known is None:
            layout = decode_layout(self._blob(digest, deadline))
            known = KnownLayout(layout, segment_table(layout))
            self._remember_layout(digest, known)
        self._layouts.move_to_end(digest)
        return known

    def _remember_layout(self, digest: bytes, known: KnownLayout) -> None:
        self._layouts[digest] = known
        while len(self._layouts) > self._most_layouts:
            self._layouts.popitem(last=False)

    def _blob(self, digest: bytes, deadline: Deadline) -> bytes:
        data = self._blobs.get(digest)
        if data is None:
            data = self._fetch(digest, deadline)
        self._remember(digest, data)
        return data

    def _remember(self, digest: bytes, data: bytes) -> None:
        if self._blobs.pop(digest, None) is None:
            self._bytes += len(data)
        self._blobs[digest] = data
        while self._bytes > _CACHED_BYTES and len(self._blobs) > 1:
            self._bytes -= len(self._blobs.popitem(last=False)[1])

    def _fetch(self, digest: bytes, deadline: Deadline) -> bytes:
        for last in (*[False] * (_TRIES - 1), True):
            try:
                reply = self._call(GetBlob(digest), deadline)
            except StateError:
                if last:
                    raise
                time.sleep(deadline.left_s(time.monotonic(), _PAUSE_S))
                continue
            if not isinstance(reply, Blob) or digest_of(reply.data) != digest:
                raise StateError("the server sent other bytes than the blob that was asked for")
            return reply.data
        raise AssertionError("the last try returns or raises")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A checked placement: `addresses` u64 [storages], one device name per storage, where it shows its progress."""

    agent: bytes
    addresses: NDArray[np.uint64]
    devices: tuple[str, ...]
    word: int = 0


def decode_placement(data: bytes, known: KnownLayout, transport: str) -> Whereabouts:
    """Decode and check a placement blob from anyone; raises LayoutMismatch or TransportError saying what is wrong.

    The source has to serve in a way by which `transport` reads: `auto` on either side stands for several.
    """
    try:
        placement = msgspec.msgpack.decode(data, type=Placement)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LayoutMismatch(f"a placement cannot be read: {error}") from None
    offered = ways_of(placement.transport, placement.agent)
    if placement.transport == AUTO and set(placement.device_names) - {"cpu"}:
        offered &= {"nixl"}  # the other ways serve no more of it than where it shows its progress
    if not ways_of(transport) & offered:
        raise TransportError(no_way(transport, offered))
    storages = len(known.layout.storages)
    if len(placement.addresses) != 8 * storages or len(placement.devices) != storages:
        raise LayoutMismatch(f"a placement does not name an address and a device for each of {storages:,} storages")
    if storages and max(placement.devices) >= len(placement.device_names):
        raise LayoutMismatch("a placement names a device that it does not list")
    addresses = np.frombuffer(placement.addresses, "<u8").astype(np.uint64)
    lengths = np.zeros(storages, np.uint64)
    np.add.at(lengths, known.table.storage, known.table.length_bytes)
    if bool((addresses > np.uint64(2**64 - 1) - lengths).any()) or bool(((addresses == 0) & (lengths > 0)).any()):
        raise LayoutMismatch("a placement names memory that cannot exist")
    if placement.word % WORD_BYTES or not 0 <= placement.word <= 2**64 - WORD_BYTES:
        raise LayoutMismatch("a placement shows its progress where no memory can be")
    devices = tuple(placement.device_names[index] for index in placement.devices)
    return Whereabouts(placement.agent, addresses, devices, placement.word)
