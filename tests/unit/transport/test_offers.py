"""Descriptions of one transport and of several, from peers that may send anything."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.description import (
    WAYS,
    Members,
    decode_description,
    decode_offer,
    encode_description,
    encode_offer,
    no_way,
    ways_of,
)
from tensorhub_core.transport.host import Host

HOST = Host("boot", 1, 2)
TCP = encode_description("tcp", "t", b"tcp's")
CMA = encode_description("cma", "c", b"cma's")
BOTH = encode_offer("a", HOST, True, [TCP, CMA])


def test_an_offer_comes_back_as_it_was() -> None:
    found = decode_offer(BOTH)
    assert (found.agent, found.host, found.rdma) == ("a", HOST, True)
    assert found.descriptions == {"tcp": TCP, "cma": CMA}
    assert decode_offer(encode_offer("a", None, False, [])).descriptions == {}


def test_a_single_description_is_an_offer_of_one_way() -> None:
    found = decode_offer(TCP)
    assert (found.agent, found.host, dict(found.descriptions)) == ("t", None, {"tcp": TCP})


def test_a_named_transport_finds_its_member_inside() -> None:
    assert decode_description(BOTH, "tcp") == decode_description(TCP, "tcp")
    assert decode_description(BOTH, "auto").agent == "a"
    with pytest.raises(TransportError, match=r"serves by cma, tcp, this worker reads by nixl alone"):
        decode_description(BOTH, "nixl")
    with pytest.raises(TransportError, match="serves by tcp"):
        decode_description(TCP, "auto")


def test_two_that_cannot_read_each_other_hear_what_each_has_and_what_to_set() -> None:
    said = no_way("tcp", ["cma"])
    assert said.startswith("the source serves by cma, this worker reads by tcp alone: ")
    assert "set transport='auto'" in said
    assert "TENSORHUB_TRANSPORT" in said
    assert said.endswith("or transport='tcp' for the source")
    assert "set transport='auto' (connect(transport=...) or TENSORHUB_TRANSPORT) for the source" in no_way(
        "auto", ["x"]
    )
    assert "serves by nothing" in no_way("tcp", [])
    hostile = no_way("tcp", ["a\nb" + "x" * 1000, "cma"])
    assert "\n" not in hostile
    assert len(hostile) < 300


def test_ways_in_common() -> None:
    assert ways_of("nixl") == {"nixl"}
    assert ways_of("auto") == set(WAYS) == ways_of("auto", b"")
    assert ways_of("auto", BOTH) == {"tcp", "cma"}
    assert ways_of("auto", TCP) == {"tcp"}
    assert ways_of("memory", b"anything") == {"memory"}


def test_hostile_offers_are_refused() -> None:
    inner = encode_offer("inner", HOST, False, [BOTH])
    assert decode_offer(inner).descriptions == {"auto": BOTH}  # no way that anybody reads by
    many = encode_offer("a", HOST, False, [TCP] * 17)
    noise = encode_offer("a", HOST, False, [b"noise"])
    damaged = encode_offer("a", HOST, False, [TCP[:-1]])
    no_members = encode_description("auto", "a", b"")
    odd = encode_description("auto", "a", msgspec.msgpack.encode([1, 2, 3]))
    for wrong in (many, noise, damaged, no_members, odd, b"", BOTH[:-1]):
        with pytest.raises(TransportError):
            decode_offer(wrong)
        with pytest.raises(TransportError):
            decode_description(wrong, "tcp")
        with pytest.raises(TransportError):
            ways_of("auto", wrong or b"\0")


def test_random_damage_is_found() -> None:
    chance = np.random.default_rng(1)
    for _ in range(500):
        broken = bytearray(BOTH)
        broken[int(chance.integers(len(broken)))] ^= int(chance.integers(1, 256))
        try:
            found = decode_offer(bytes(broken))
        except TransportError:
            continue
        # The names around the checked parts are not covered by a digest: what is inside is.
        assert set(found.descriptions.values()) <= {TCP, CMA, bytes(broken)}


def test_an_offer_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(TransportError, match="fewer, larger regions"):
        encode_offer("a", HOST, False, [bytes(17 << 20)])


def test_the_members_are_a_list_on_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Members(HOST, True, (b"x",)))) == [
        ["boot", 1, 2],
        True,
        [b"x"],
    ]
