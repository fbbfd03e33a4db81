"""Frame what two `tcp` transports say to each other: bytes in, bytes out, no sockets.

A frame is a header of 16 bytes and its payload; integers are little-endian. Both sides prove that they know the secret
of the description before anything is asked for, then requests are answered in order:

    reader                      source
    HELLO(nonce)           ->
                           <-   CHALLENGE(nonce, proof)
    PROOF(proof)           ->
                           <-   WELCOME() or REFUSED(text)
    READ(runs)             ->
                           <-   BYTES(the runs' bytes) or REFUSED(text)

A proof is an HMAC over both nonces and the agent's name, so the secret itself never travels here, and a stranger who
got the port of a source that is gone cannot pass for it. The bytes themselves are neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import ipaddress
import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.host import Host

NONCE_BYTES = 16
SECRET_BYTES = 16
PROOF_BYTES = 32
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
RUN_BYTES = 16
MOST_RUNS = 1 << 16
"""Runs of one request."""
MOST_REQUEST_BYTES = MOST_RUNS * RUN_BYTES
MOST_TEXT_BYTES = 1024
MOST_ENDPOINTS = 64

_MAGIC = b"THB1"
_HEADER = struct.Struct("<4sHHQ")
HEADER_BYTES = _HEADER.size
_WIRE = 1
_U64 = np.dtype("<u8")


class WireError(Exception):
    """The other side does not keep to the protocol: the connection is of no use any more."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    READ = 5
    BYTES = 6
    REFUSED = 7


@dataclass(frozen=True, slots=True)
class Header:
    """Head of a frame; `number` is that of the request modulo 65,536."""

    kind: Kind
    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a source listens: a numeric IPv4 or IPv6 address."""

    address: str
    port: int

    @property
    def loopback(self) -> bool:
        """Tell whether only the source's own machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        """Return the usual text form."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class TcpOffer:
    """What a description says about a source.

    `regions` are those it serves, packed as `pack_regions` does.
    """

    secret: bytes
    host: Host | None
    endpoints: tuple[Endpoint, ...]
    regions: bytes


class _Metadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    wire: int
    secret: bytes
    host: Host | None
    endpoints: list[tuple[str, int]]
    regions: bytes


def encode_metadata(offer: TcpOffer) -> bytes:
    """Encode what a description carries."""
    endpoints = [(endpoint.address, endpoint.port) for endpoint in offer.endpoints]
    return msgspec.msgpack.encode(_Metadata(_WIRE, offer.secret, offer.host, endpoints, offer.regions))


def decode_metadata(data: bytes) -> TcpOffer:
    """Decode what anyone may have written into a description; raises TransportError unless it is sound."""
    try:
        found = msgspec.msgpack.decode(data, type=_Metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TransportError(f"a peer's description cannot be read: {error}") from None
    if found.wire != _WIRE:
        raise TransportError(f"the peer speaks version {found.wire} of the tcp transport, this side version {_WIRE}")
    if len(found.secret) != SECRET_BYTES:
        raise TransportError(f"a peer's description has a secret of {len(found.secret)} bytes")
    if not 0 < len(found.endpoints) <= MOST_ENDPOINTS:
        raise TransportError(f"a peer's description names {len(found.endpoints)} addresses")
    endpoints = tuple(_endpoint(address, port) for address, port in found.endpoints)
    return TcpOffer(found.secret, found.host, endpoints, found.regions)


def _endpoint(address: str, port: int) -> Endpoint:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise TransportError(f"a peer's description names {address[:64]!r}, which is no address") from None
    if "%" in address or not 0 < port < 1 << 16:
        raise TransportError(f"a peer's description names {address[:64]!r} port {port}, which nobody can reach")
    return Endpoint(address, port)


def encode_frame(kind: Kind, number: int = 0, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return encode_header(kind, number, len(payload)) + payload


def encode_header(kind: Kind, number: int, size_bytes: int) -> bytes:
    """Return the head of a frame whose payload follows from elsewhere."""
    return _HEADER.pack(_MAGIC, kind, number & 0xFFFF, size_bytes)


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Decode HEADER_BYTES; raises WireError if they are not a header."""
    magic, kind, number, size_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or kind not in Kind._value2member_map_:
        raise WireError("it does not speak the tcp transport's protocol")
    return Header(Kind(kind), number, size_bytes)


def encode_runs(addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64]) -> bytes:
    """Return the payload of READ: all addresses [runs], then all lengths [runs]."""
    return addresses.astype(_U64, copy=False).tobytes() + length_bytes.astype(_U64, copy=False).tobytes()


def decode_runs(payload: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return addresses and lengths u64 [runs]; raises WireError if the payload is not that of READ."""
    if not payload or len(payload) % RUN_BYTES:
        raise WireError("a request names no whole runs")
    both = np.frombuffer(payload, _U64).astype(np.uint64, copy=False)
    return both[: len(both) // 2], both[len(both) // 2 :]


def encode_text(text: str) -> bytes:
    """Return the payload of REFUSED, cut to its bound."""
    return text.encode(errors="replace")[:MOST_TEXT_BYTES]


def decode_text(payload: bytes | bytearray) -> str:
    """Return a refusal's text, made printable: it comes from elsewhere."""
    return "".join(letter if letter.isprintable() else "?" for letter in bytes(payload).decode(errors="replace"))


def prove(secret: bytes, role: str, agent: str, reader_nonce: bytes, source_nonce: bytes) -> bytes:
    """Return the proof that `role`, reader or source, knows the secret of an agent."""
    name = agent.encode(errors="surrogatepass")
    return hmac.digest(secret, role.encode() + b"\0" + reader_nonce + source_nonce + name, "sha256")


def proves(proof: bytes, secret: bytes, role: str, agent: str, reader_nonce: bytes, source_nonce: bytes) -> bool:
    """Tell whether a proof is right, in a time that tells nothing about it."""
    return hmac.compare_digest(proof, prove(secret, role, agent, reader_nonce, source_nonce))


class FrameBuffer:
    """Cut a stream of bytes into frames; holds at most one frame and what came along with it."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __len__(self) -> int:
        """Return how many bytes wait for the rest of their frame."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Add bytes."""
        self._data += data

    def take(self, kind: Kind, least_bytes: int, most_bytes: int) -> tuple[int, bytes] | None:
        """Return number and payload of the next frame, None if it is not whole yet.

        Raises WireError as soon as its head is there, if it is of another kind or its size is out of bounds.
        """
        if len(self._data) < HEADER_BYTES:
            if self._data[: len(_MAGIC)] != _MAGIC[: len(self._data)]:
                raise WireError("it does not speak the tcp transport's protocol")
            return None
        header = decode_header(self._data)
        if header.kind is not kind or not least_bytes <= header.size_bytes <= most_bytes:
            raise WireError(f"a {header.kind.name} of {header.size_bytes:,} bytes came where a {kind.name} belongs")
        end = HEADER_BYTES + header.size_bytes
        if len(self._data) < end:
            return None
        payload = bytes(self._data[HEADER_BYTES:end])
        del self._data[:end]
        return header.number, payload
