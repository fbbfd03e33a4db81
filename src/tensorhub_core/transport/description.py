"""Carry what a peer needs for `attach` in one bounded envelope, whatever the transport puts into it.

A peer that serves in several ways (`auto`) puts the envelope of each into one of its own. A reader that was told which
transport to use finds its own inside; one that may choose takes a single one as an offer of one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.host import Host

AUTO = "auto"
WAYS: tuple[str, ...] = ("cma", "nixl", "tcp")
"""What `auto` chooses from."""
_MOST_MEMBERS = 16
_MOST_SHOWN = 32
_MOST_PLACES = 8
FORMAT = 1
MAX_DESCRIPTION_BYTES = 16 << 20
"""Upper bound of a description: NIXL needs about 44 bytes per region."""
MAX_AGENT_NAME_BYTES = 256


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name an agent, the transport it belongs to and that transport's own connection data."""

    format: int
    transport: str
    agent: str
    metadata: bytes
    digest: bytes
    """xxh3_128 of `metadata`, `places` and `agent`: NIXL does not recover from metadata that were cut off or damaged,
    and UCX ends the process over some."""
    places: tuple[str, ...] = ()
    """Interfaces and addresses where it is served, for people; those that `metadata` needs are in there."""


class Members(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What `auto` has instead of connection data of its own: `descriptions` holds an envelope for each way."""

    host: Host | None
    rdma: bool
    descriptions: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """The ways to a peer, as envelopes by transport; where it is and whether it has RDMA, if it says so."""

    agent: str
    descriptions: Mapping[str, bytes]
    host: Host | None = None
    rdma: bool = False


def encode_description(transport: str, agent: str, metadata: bytes, places: Sequence[str] = ()) -> bytes:
    """Encode an envelope; raises TransportError above MAX_DESCRIPTION_BYTES."""
    told = tuple(places[:_MOST_PLACES])
    data = msgspec.msgpack.encode(Description(FORMAT, transport, agent, metadata, _digest(metadata, told, agent), told))
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise TransportError(
            f"the transport's description takes {len(data):,} bytes, over the limit of {MAX_DESCRIPTION_BYTES:,}: "
            "register fewer, larger regions"
        )
    return data


def decode_description(data: bytes, transport: str) -> Description:
    """Decode an envelope from anyone; raises TransportError unless it is, or holds, a sound one of `transport`."""
    found = _decode(data)
    if found.transport == AUTO != transport:
        inside = _members(found)[1]
        if transport not in inside:
            raise TransportError(no_way(transport, inside))
        found = _decode(inside[transport])
    if found.transport != transport:
        raise TransportError(no_way(transport, (found.transport,)))
    return found


def encode_offer(agent: str, host: Host | None, rdma: bool, descriptions: Sequence[bytes]) -> bytes:
    """Encode the envelope of a peer that serves in several ways; raises TransportError if it is too long."""
    members = Members(host, rdma, tuple(descriptions))
    return encode_description(AUTO, agent, msgspec.msgpack.encode(members))


def decode_offer(data: bytes) -> Offer:
    """Decode an envelope of any kind from anyone; raises TransportError unless it is sound."""
    found = _decode(data)
    if found.transport != AUTO:
        return Offer(found.agent, {found.transport: data})
    members, inside = _members(found)
    return Offer(found.agent, inside, members.host, members.rdma)


def with_places(failure: str, data: bytes) -> str:
    """Return the text of a failure to reach a peer, and where the peer says that it serves, if the text does not."""
    try:
        offer = decode_offer(data)
        places = [place for each in offer.descriptions.values() for place in _decode(each).places]
    except TransportError:
        return failure
    shown = ["".join(c for c in place if c.isprintable())[:_MOST_SHOWN] for place in places[:_MOST_PLACES]]
    return f"{failure}; it serves at {', '.join(dict.fromkeys(shown))}" if shown else failure


def ways_of(transport: str, description: bytes = b"") -> frozenset[str]:
    """Return by which transports a side reads (without a description) or serves; raises TransportError."""
    if transport != AUTO:
        return frozenset((transport,))
    return frozenset(decode_offer(description).descriptions if description else WAYS)


def no_way(reader: str, offered: Collection[str]) -> str:
    """Say that a reader told to use the transport `reader` finds none of its ways among those a source offers."""
    listed = ", ".join(way if way in WAYS else repr(way[:_MOST_SHOWN]) for way in sorted(offered)) or "nothing"
    if reader == AUTO:
        return f"the source serves by {listed}, this worker reads by {', '.join(WAYS)}: {_set(AUTO)} for the source"
    return (
        f"the source serves by {listed}, this worker reads by {reader} alone: {_set(AUTO)} for this worker, "
        f"or transport={reader!r} for the source"
    )


def _set(transport: str) -> str:
    return f"set transport={transport!r} (connect(transport=...) or TENSORHUB_TRANSPORT)"


def _decode(data: bytes) -> Description:
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise TransportError(f"a peer's description of {len(data):,} bytes is over {MAX_DESCRIPTION_BYTES:,}")
    try:
        found = msgspec.msgpack.decode(data, type=Description)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransportError(f"a peer's description cannot be read: {error}") from None
    if found.format != FORMAT:
        raise TransportError(f"a peer's description has format {found.format}, this side reads {FORMAT}")
    if not 0 < len(found.agent.encode(errors="surrogatepass")) <= MAX_AGENT_NAME_BYTES:
        raise TransportError("a peer's description names no agent, or one with too long a name")
    if _digest(found.metadata, found.places, found.agent) != found.digest:
        raise TransportError("a peer's description was damaged on the way")
    return found


def _members(found: Description) -> tuple[Members, dict[str, bytes]]:
    """Return what an envelope of several holds, and its members by transport."""
    try:
        members = msgspec.msgpack.decode(found.metadata, type=Members)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransportError(f"a peer's description cannot be read: {error}") from None
    if len(members.descriptions) > _MOST_MEMBERS:
        raise TransportError(f"a peer's description has {len(members.descriptions)} ways to it, over {_MOST_MEMBERS}")
    return members, {_decode(data).transport: data for data in members.descriptions}


def _digest(metadata: bytes, places: Sequence[str], agent: str) -> bytes:
    digest = xxhash.xxh3_128(metadata)
    digest.update("\0".join((*places, agent)).encode(errors="surrogatepass"))
    return digest.digest()
