"""The codec returns what was encoded, and answers everything else with its own errors."""

from __future__ import annotations

import random
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_core.errors import ERRORS, ProtocolMismatch, error_from_wire
from tensorhub_core.state import messages
from tensorhub_core.wire.codec import (
    MAX_MESSAGE_BYTES,
    Frames,
    MalformedMessage,
    decode_reply,
    decode_request,
    encode,
    split,
)

NUMBERS = st.integers(0, 2**64 - 1)
ENCODABLE = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(),
    bytes: st.binary(max_size=100),
    bool: st.booleans(),
}


def values(kind: object) -> st.SearchStrategy[object]:
    """Return a strategy for a field's type; the types are those of the structs, so none is forgotten."""
    if kind in ENCODABLE:
        return ENCODABLE[kind]  # type: ignore[index]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        return bounded(*arguments)
    if kind is type(None):
        return st.none()
    if get_origin(kind) is Literal:
        return st.sampled_from(arguments)
    if get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*(values(argument) for argument in arguments))
    assert arguments, kind
    return st.one_of([values(argument) for argument in arguments])


def bounded(kind: object, meta: msgspec.Meta) -> st.SearchStrategy[object]:
    if kind is int:
        return st.integers(meta.ge, meta.le)
    return values(kind)  # what is generated is shorter than any bound


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


REQUESTS = st.one_of([structs(kind) for kind in get_args(messages.Request)])
REPLIES = st.one_of([structs(kind) for kind in get_args(messages.Reply)])


@settings(max_examples=300, deadline=None)
@given(NUMBERS, REQUESTS)
def test_every_request_comes_back(number: int, message: messages.Request) -> None:
    frames = split(encode(number, message))
    assert (frames.request, frames.protocol) == (number, messages.PROTOCOL)
    assert decode_request(frames) == message


@settings(max_examples=300, deadline=None)
@given(NUMBERS, REPLIES)
def test_every_reply_comes_back(number: int, message: messages.Reply) -> None:
    assert decode_reply(split(encode(number, message))) == message


@pytest.mark.parametrize(
    "message",
    [messages.Published(2**64, 0), messages.Published(0, -(2**70)), messages.Failure("state_error", "\udc80")],
    ids=["above 64 bits", "far below", "no unicode"],
)
def test_what_has_no_form_is_refused_with_its_name(message: messages.Reply) -> None:
    with pytest.raises(MalformedMessage, match=type(message).__name__):
        encode(1, message)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_frames_are_split_or_malformed(frames: list[bytes]) -> None:
    try:
        header = split(frames)
    except MalformedMessage:
        return
    assert frames[0][:2] == b"TH"
    assert len(frames[0]) == 12
    assert header.body == frames[1]


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=500))
def test_any_body_decodes_or_is_malformed(body: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            message = decode(Frames(messages.PROTOCOL, 1, body))
        except MalformedMessage:
            continue
        assert isinstance(message, messages.Message)


@settings(max_examples=300, deadline=None)
@given(REQUESTS, st.randoms(use_true_random=False), st.integers(1, 5))
def test_damaged_requests_decode_or_are_malformed(message: messages.Request, chance: random.Random, hits: int) -> None:
    body = bytearray(encode(1, message)[1])
    for _ in range(hits):
        where = chance.randrange(len(body) + 1)
        if chance.random() < 0.5 and where < len(body):
            body[where] = chance.randrange(256)
        else:
            body[where:where] = chance.randbytes(chance.randrange(4))
    try:
        decoded = decode_request(Frames(messages.PROTOCOL, 1, bytes(body)))
    except MalformedMessage:
        return
    assert decode_request(split(encode(1, decoded))) == decoded, "what passes is a message like any other"


@given(st.integers(0, 2**16 - 1).filter(lambda version: version != messages.PROTOCOL), st.binary(max_size=50))
def test_another_protocol_is_a_mismatch_whatever_its_body(version: int, body: bytes) -> None:
    frames = split([encode(3, messages.Heartbeat(), protocol=version)[0], body])
    for decode in (decode_request, decode_reply):
        with pytest.raises(ProtocolMismatch, match=str(version)):
            decode(frames)


def test_a_message_over_the_limit_is_refused_where_it_is_made() -> None:
    with pytest.raises(MalformedMessage, match="PutBlob"):
        encode(1, messages.PutBlob(b"d", bytes(MAX_MESSAGE_BYTES)))
    encode(1, messages.PutBlob(b"d", bytes(MAX_MESSAGE_BYTES - 100)))


def test_every_error_survives_the_wire() -> None:
    for code, kind in ERRORS.items():
        again = error_from_wire(code, "text", ("one", "two"))
        assert type(again) is kind
        assert str(again) == "text"
        assert getattr(again, "differences", ("one", "two")) == ("one", "two")
