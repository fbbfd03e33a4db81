"""Describing sources: blobs from anyone are checked before they are believed."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorhub_core.client import access
from tensorhub_core.client.access import SourceBook, SourceFault
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, StateError, TensorHubError
from tensorhub_core.layout.canonical import build_layout, digest_of, encode_layout
from tensorhub_core.layout.types import Placement, TensorSpec
from tensorhub_core.state.messages import Blob, GetBlob, Ok, Reply, Request, Source
from tensorhub_core.transport.description import encode_description, encode_offer

LAYOUT = build_layout(
    [TensorSpec("a", "float32", (4096,)), TensorSpec("b", "uint8", (0, 3)), TensorSpec("c", "bfloat16", ())],
    shard=0,
    num_shards=1,
    segment_bytes=4096,
)
SUMS = np.arange(5, dtype=np.uint64)
AUTO = encode_offer("agent", None, False, [encode_description(way, "agent", b"") for way in ("tcp", "cma")])


def placement(**more: Any) -> Placement:
    fields = {
        "transport": "memory",
        "agent": b"agent",
        "addresses": np.array([4096, 0, 1 << 20], "<u8").tobytes(),
        "device_names": ("cpu",),
        "devices": bytes(3),
    }
    return Placement(**{**fields, **more})


class Server:
    """Blobs by digest, with the requests counted."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, bytes] = {}
        self.requests = 0
        self.error: TensorHubError | None = None
        self.missing = 0

    def put(self, data: bytes) -> bytes:
        self.blobs[digest_of(data)] = data
        return digest_of(data)

    def call(self, message: Request, deadline: Deadline) -> Reply:
        assert isinstance(message, GetBlob)
        self.requests += 1
        if self.error is not None:
            raise self.error
        if self.missing:
            self.missing -= 1
            raise StateError("no such blob")
        return Blob(message.digest, self.blobs[message.digest])

    def source(
        self, layout: bytes | None = None, place: bytes | None = None, sums: bytes | None = None, **more: Any
    ) -> Source:
        return Source(
            "l1",
            "w1",
            "trainer",
            more.get("shard", 0),
            1,
            self.put(encode_layout(LAYOUT) if layout is None else layout),
            self.put(msgspec.msgpack.encode(placement()) if place is None else place),
            self.put(pack_sums(SUMS) if sums is None else sums),
        )


def soon() -> Deadline:
    return Deadline.after(5.0, time.monotonic())


def test_a_source_is_described_from_its_blobs_and_they_are_fetched_once() -> None:
    server = Server()
    book = SourceBook(server.call, "memory")
    for _ in range(3):
        (found,) = book.access([server.source()], {"l1": 2}, soon())
        assert found.layout == LAYOUT
        assert found.addresses.tolist() == [4096, 0, 1 << 20]
        assert found.devices == ("cpu", "cpu", "cpu")
        assert found.sums.tolist() == SUMS.tolist()
        assert (found.lease, found.replica, found.description, found.prefix) == ("l1", "trainer", b"agent", 2)
    assert server.requests == 3
    (whole,) = book.access([server.source()], {}, soon())
    assert whole.prefix == 5


@pytest.mark.parametrize(
    ("reads", "serves", "agent", "fits"),
    [
        ("auto", "auto", AUTO, True),
        ("tcp", "auto", AUTO, True),
        ("nixl", "auto", AUTO, False),
        ("nixl", "auto", b"", True),  # a source of empty tensors serves nothing, and there is nothing to read
        ("auto", "nixl", b"its own", True),
        ("auto", "memory", b"its own", False),
        ("tcp", "tcp", b"its own", True),
        ("tcp", "cma", b"its own", False),
    ],
)
def test_a_source_and_its_reader_need_a_way_in_common(reads: str, serves: str, agent: bytes, fits: bool) -> None:
    server = Server()
    source = server.source(place=msgspec.msgpack.encode(placement(transport=serves, agent=agent)))
    book = SourceBook(server.call, reads)
    if fits:
        assert book.access([source], {}, soon())[0].description == agent
    else:
        with pytest.raises(
            SourceFault, match=f"this worker reads by {'cma' if reads == 'auto' else reads}.*: set transport='auto'"
        ):
            book.access([source], {}, soon())


HOSTILE: dict[str, dict[str, Any]] = {
    "layout is noise": {"layout": b"\xff" * 100},
    "layout is empty": {"layout": b""},
    "placement is noise": {"place": b"\x93\x01"},
    "placement of another transport": {"place": msgspec.msgpack.encode(placement(transport="nixl"))},
    "placement of other ways": {"place": msgspec.msgpack.encode(placement(transport="auto", agent=AUTO))},
    "placement of an agent that is noise": {"place": msgspec.msgpack.encode(placement(transport="auto"))},
    "too few addresses": {"place": msgspec.msgpack.encode(placement(addresses=bytes(16)))},
    "too many devices": {"place": msgspec.msgpack.encode(placement(devices=bytes(4)))},
    "device not listed": {"place": msgspec.msgpack.encode(placement(devices=b"\0\0\1"))},
    "no device": {"place": msgspec.msgpack.encode(placement(device_names=()))},
    "address wraps around": {
        "place": msgspec.msgpack.encode(placement(addresses=np.array([2**64 - 5, 0, 9], "<u8").tobytes()))
    },
    "address is null": {"place": msgspec.msgpack.encode(placement(addresses=bytes(24)))},
    "too few sums": {"sums": bytes(8)},
    "sums of odd length": {"sums": bytes(39)},
    "another shard's layout": {"shard": 1},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_blobs_name_the_source_to_leave(kind: str) -> None:
    server = Server()
    with pytest.raises(SourceFault) as fault:
        SourceBook(server.call, "memory").access([server.source(**HOSTILE[kind])], {}, soon())
    assert fault.value.lease == "l1"


def test_a_blob_that_is_a_moment_late_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_PAUSE_S", 0.0)
    server = Server()
    server.missing = 4
    assert len(SourceBook(server.call, "memory").access([server.source()], {}, soon())) == 1
    server.missing = 5
    with pytest.raises(SourceFault, match="no such blob"):
        SourceBook(server.call, "memory").access([server.source()], {}, soon())


@pytest.mark.parametrize("kind", [DeadlineExceeded, ServerUnreachable])
def test_a_lost_server_is_not_the_sources_fault(kind: type[TensorHubError]) -> None:
    server = Server()
    server.error = kind("late")
    with pytest.raises(kind):
        SourceBook(server.call, "memory").access([server.source()], {}, soon())


def test_a_server_that_sends_other_bytes_is_not_believed() -> None:
    server = Server()
    source = server.source()
    server.blobs[source.sums] = bytes(40)
    with pytest.raises(SourceFault, match="other bytes"):
        SourceBook(server.call, "memory").access([source], {}, soon())

    def odd(message: Request, deadline: Deadline) -> Reply:
        return Ok()

    with pytest.raises(SourceFault, match="other bytes"):
        SourceBook(odd, "memory").access([source], {}, soon())


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_CACHED_BYTES", 1000)
    server = Server()
    book = SourceBook(server.call, "memory")
    for number in range(50):
        sums = pack_sums(np.full(5, number, np.uint64))
        book.access([server.source(sums=sums)], {}, soon())
    assert sum(len(data) for data in book._blobs.values()) <= 1000
    assert book._bytes == sum(len(data) for data in book._blobs.values())


def test_the_layouts_of_all_sources_of_a_read_are_kept_for_the_next_one() -> None:
    server, count = Server(), 3 * access._CACHED_LAYOUTS
    book = SourceBook(server.call, "memory")
    shards = [build_layout(LAYOUT.tensors, shard=at, num_shards=count, segment_bytes=4096) for at in range(count)]
    sources = [
        msgspec.structs.replace(server.source(encode_layout(shard)), shard=at, num_shards=count)
        for at, shard in enumerate(shards)
    ]
    first, second = (book.access(sources, {}, soon()) for _ in range(2))
    assert all(one.layout is other.layout for one, other in zip(first, second, strict=True))
    for _ in range(2):
        book.access([server.source()], {}, soon())
    assert len(book._layouts) <= count + 1
    other = build_layout([TensorSpec("a", "uint8", (1,))], shard=0, num_shards=1)
    place = msgspec.msgpack.encode(placement(addresses=np.array([4096], "<u8").tobytes(), devices=bytes(1)))
    book.access([server.source(encode_layout(other), place, pack_sums(SUMS[:1]))], {}, soon())
    assert len(book._layouts) == access._CACHED_LAYOUTS
