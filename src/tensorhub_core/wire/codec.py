"""Encode messages as two frames: a fixed header that any protocol version can read, and a msgpack body.

Header: 2 magic bytes `TH`, the protocol version as big-endian u16, the request number as big-endian u64 (0 = push). It
never changes, so that a peer of another version is answered with a clear error instead of a decoding failure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tensorhub_core.errors import ProtocolMismatch, TensorHubError
from tensorhub_core.state.messages import PROTOCOL, Reply, Request

MAGIC = b"TH"
_HEADER = struct.Struct(">2sHQ")
MAX_MESSAGE_BYTES = 64 << 20
"""Upper bound of a message, on both sides; ZeroMQ drops the peer that sends a larger frame."""


class MalformedMessage(TensorHubError):
    """The frames are not a message of this protocol."""

    code = "malformed_message"


class Frames(NamedTuple):
    """A decoded header with its still encoded body."""

    protocol: int
    request: int
    body: bytes


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(request: int, message: Request | Reply, protocol: int = PROTOCOL) -> list[bytes]:
    """Encode a message with its request number; raises MalformedMessage above MAX_MESSAGE_BYTES, or if it has no form.

    A number of more than 64 bits has none, nor has text that is no unicode.
    """
    try:
        body = _encoder.encode(message)
    except (msgspec.EncodeError, ArithmeticError, ValueError, TypeError) as error:
        raise MalformedMessage(f"a {type(message).__name__} cannot be encoded: {error}") from None
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            f"a {type(message).__name__} of {len(body):,} bytes is over the limit of {MAX_MESSAGE_BYTES:,}"
        )
    return [_HEADER.pack(MAGIC, protocol, request), body]


def split(frames: Sequence[bytes]) -> Frames:
    """Read the header; raises MalformedMessage if it is not ours."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise MalformedMessage(f"expected a {_HEADER.size}-byte header and a body, got {len(frames)} frames")
    magic, protocol, request = _HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise MalformedMessage("the header does not start with 'TH'")
    return Frames(protocol, request, frames[1])


def decode_request(frames: Frames) -> Request:
    """Decode a client's message; raises ProtocolMismatch or MalformedMessage."""
    _check_protocol(frames.protocol)
    try:
        return _requests.decode(frames.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a request of this protocol: {error}") from None


def decode_reply(frames: Frames) -> Reply:
    """Decode a server's message; raises ProtocolMismatch or MalformedMessage."""
    _check_protocol(frames.protocol)
    try:
        return _replies.decode(frames.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"not a reply of this protocol: {error}") from None


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"the peer speaks protocol {protocol}, this side speaks {PROTOCOL}: run the same release"
        )
