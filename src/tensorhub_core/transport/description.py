"""Carry what a peer needs for `attach` in one bounded envelope, whatever the transport puts into it."""

from __future__ import annotations

import msgspec
import xxhash

from tensorhub_core.errors import TransportError

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
    """xxh3_128 of `metadata`: NIXL does not recover from metadata that were cut off or damaged on the way."""


def encode_description(transport: str, agent: str, metadata: bytes) -> bytes:
    """Encode an envelope; raises TransportError above MAX_DESCRIPTION_BYTES."""
    data = msgspec.msgpack.encode(Description(FORMAT, transport, agent, metadata, _digest(metadata)))
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise TransportError(
            f"the transport's description takes {len(data):,} bytes, over the limit of {MAX_DESCRIPTION_BYTES:,}: "
            "register fewer, larger regions"
        )
    return data


def decode_description(data: bytes, transport: str) -> Description:
    """Decode an envelope from anyone; raises TransportError unless it is a sound one of `transport`."""
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise TransportError(f"a peer's description of {len(data):,} bytes is over {MAX_DESCRIPTION_BYTES:,}")
    try:
        found = msgspec.msgpack.decode(data, type=Description)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransportError(f"a peer's description cannot be read: {error}") from None
    if found.format != FORMAT:
        raise TransportError(f"a peer's description has format {found.format}, this side reads {FORMAT}")
    if found.transport != transport:
        raise TransportError(f"the peer serves by {found.transport[:32]!r}, this side reads by {transport!r}")
    if not 0 < len(found.agent.encode(errors="surrogatepass")) <= MAX_AGENT_NAME_BYTES:
        raise TransportError("a peer's description names no agent, or one with too long a name")
    if _digest(found.metadata) != found.digest:
        raise TransportError("a peer's description was damaged on the way")
    return found


def _digest(metadata: bytes) -> bytes:
    return xxhash.xxh3_128_digest(metadata)
