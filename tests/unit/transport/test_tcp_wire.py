"""The tcp transport's frames: whatever way they are cut, they come out whole; whatever else comes, it is refused."""

from __future__ import annotations

import hashlib
import hmac
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.host import Host
from tensorhub_core.transport.tcp_wire import (
    HEADER_BYTES,
    MOST_REQUEST_BYTES,
    MOST_TEXT_BYTES,
    Endpoint,
    FrameBuffer,
    Kind,
    TcpOffer,
    WireError,
    decode_header,
    decode_metadata,
    decode_runs,
    decode_text,
    encode_frame,
    encode_metadata,
    encode_runs,
    encode_text,
    prove,
    proves,
)

OFFER = TcpOffer(b"s" * 16, Host("boot", 1, 2), (Endpoint("10.0.0.1", 7000), Endpoint("fd00::1", 7000)), b"r" * 32)


def test_a_frame_is_what_the_protocol_says() -> None:
    frame = encode_frame(Kind.READ, 65_537, b"abc")
    assert frame == b"THB1" + struct.pack("<HHQ", 5, 1, 3) + b"abc"
    header = decode_header(frame)
    assert (header.kind, header.number, header.size_bytes) == (Kind.READ, 1, 3)


@given(payloads=st.lists(st.binary(max_size=200), max_size=5), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_frames_come_out_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(Kind.READ, number, payload) for number, payload in enumerate(payloads))
    frames, found, at, step = FrameBuffer(), [], 0, 0
    while at < len(stream):
        size = cuts[step % len(cuts)]
        frames.feed(stream[at : at + size])
        at, step = at + size, step + 1
        while len(frames) and (frame := frames.take(Kind.READ, 0, 200)) is not None:
            found.append(frame)
    assert found == list(enumerate(payloads))
    assert len(frames) == 0


@given(data=st.binary(max_size=100))
def test_anything_else_is_refused_or_waits_for_more(data: bytes) -> None:
    frames = FrameBuffer()
    frames.feed(data)
    try:
        found = frames.take(Kind.HELLO, 16, 16)
    except WireError:
        assert data[:16] != encode_frame(Kind.HELLO, 0, b"n" * 16)[:16]
        return
    assert found is not None or b"THB1".startswith(data[:4])


@pytest.mark.parametrize("size", [1 << 30, MOST_REQUEST_BYTES + 1, 2**64 - 1, 15])
def test_a_size_out_of_bounds_is_refused_before_its_payload_is_there(size: int) -> None:
    frames = FrameBuffer()
    frames.feed(b"THB1" + struct.pack("<HHQ", Kind.READ, 1, size))
    with pytest.raises(WireError, match="READ"):
        frames.take(Kind.READ, 16, MOST_REQUEST_BYTES)


def test_a_stranger_is_found_out_by_its_first_byte() -> None:
    frames = FrameBuffer()
    frames.feed(b"G")
    with pytest.raises(WireError):
        frames.take(Kind.HELLO, 16, 16)
    for wrong in (b"THB2" + bytes(12), b"THB1" + struct.pack("<HHQ", 99, 0, 0)):
        assert len(wrong) == HEADER_BYTES
        with pytest.raises(WireError):
            decode_header(wrong)


def test_runs_survive_the_way() -> None:
    addresses, lengths = np.array([1, 2**62], np.uint64), np.array([2**40, 3], np.uint64)
    found = decode_runs(encode_runs(addresses, lengths))
    assert [part.tolist() for part in found] == [addresses.tolist(), lengths.tolist()]
    for wrong in (b"", b"x" * 15, b"x" * 17):
        with pytest.raises(WireError):
            decode_runs(wrong)


def test_a_refusal_is_bounded_and_printable() -> None:
    assert len(encode_text("ü" * 5000)) <= MOST_TEXT_BYTES
    assert decode_text(encode_text("zu groß")) == "zu groß"
    assert decode_text(b"a\x1b[2J\xff\n") == "a?[2J\ufffd?"


def test_a_proof_binds_secret_role_agent_and_both_nonces() -> None:
    said = (b"k" * 16, "reader", "agent", b"1" * 16, b"2" * 16)
    expected = hmac.new(b"k" * 16, b"reader\0" + b"1" * 16 + b"2" * 16 + b"agent", hashlib.sha256).digest()
    assert prove(*said) == expected
    assert proves(expected, *said)
    others = (b"K" * 16, "source", "Agent", b"2" * 16, b"1" * 16)
    for at, other in enumerate(others):
        assert not proves(expected, *(*said[:at], other, *said[at + 1 :]))  # type: ignore[arg-type]
    assert not proves(expected[:-1], *said)


def test_a_description_survives_the_way() -> None:
    assert decode_metadata(encode_metadata(OFFER)) == OFFER
    assert [str(endpoint) for endpoint in OFFER.endpoints] == ["10.0.0.1:7000", "[fd00::1]:7000"]


@pytest.mark.parametrize(
    "wrong",
    [
        TcpOffer(b"", None, OFFER.endpoints, b""),
        TcpOffer(OFFER.secret, None, (), b""),
        TcpOffer(OFFER.secret, None, OFFER.endpoints * 33, b""),
        TcpOffer(OFFER.secret, None, (Endpoint("localhost", 1),), b""),
        TcpOffer(OFFER.secret, None, (Endpoint("fe80::1%eth0", 1),), b""),
        TcpOffer(OFFER.secret, None, (Endpoint("10.0.0.1", 0),), b""),
        TcpOffer(OFFER.secret, None, (Endpoint("10.0.0.1", 65536),), b""),
    ],
)
def test_a_description_that_names_nothing_to_connect_to_is_refused(wrong: TcpOffer) -> None:
    with pytest.raises(TransportError):
        decode_metadata(encode_metadata(wrong))


@given(data=st.binary(max_size=60))
def test_noise_is_no_description(data: bytes) -> None:
    with pytest.raises(TransportError):
        decode_metadata(data)
