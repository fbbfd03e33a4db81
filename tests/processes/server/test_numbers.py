"""Numbers as large as messages can hold them end no server, and what is larger is refused by name."""

from __future__ import annotations

import itertools
import secrets
import struct
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from tensorhub_core.client.oneshot import ask
from tensorhub_core.state import messages
from tensorhub_core.state.bounds import MOST_BYTES, MOST_COUNT, MOST_SERVER_EPOCH
from tensorhub_core.state.messages import (
    PROTOCOL,
    DescribeVersion,
    Ended,
    Failure,
    GetStatus,
    HandOver,
    Held,
    Hello,
    JoinRound,
    ListVersions,
    Published,
    Register,
    Request,
    StatusReply,
    Unpublish,
    Welcome,
)
from tensorhub_core.wire.codec import MAGIC
from tests.processes.server.raw import RawClient, ServerProcess, server_process

EXTREMES = (0, 1, MOST_COUNT - 1, MOST_COUNT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("server"), "--grace-s", "5") as running:
        yield running


def held(epoch: int, number: int, digest: bytes) -> Held:
    return Held(epoch, number, digest, digest, digest, MOST_BYTES, MOST_COUNT)


@pytest.mark.parametrize(("epoch", "number"), list(itertools.product(EXTREMES, EXTREMES)))
def test_a_life_at_the_limit_of_numbers_ends_no_server(server: ServerProcess, epoch: int, number: int) -> None:
    model, key = secrets.token_hex(8), (epoch, number)
    with RawClient(server.address) as client, RawClient(server.address) as other:
        digest = b"d" * 16
        kept = held(epoch, number, digest)
        ended = Ended(epoch, key)
        welcome = client.hello(model=model, stream="first", high=key, held=kept, offloads=(kept,), ended=ended)
        assert isinstance(welcome, Welcome)
        assert isinstance(other.hello("other", model=model, stream="second"), Welcome)
        for who in (client, other):
            blob = who.put(b"blob")
            for request in (
                Register(blob, blob, MOST_BYTES, MOST_COUNT),
                JoinRound(epoch, number, "update", key, promised=key, room_bytes=MOST_COUNT),
                JoinRound(number, again=True),
            ):
                who.post(request)
            who.ask(messages.Publish(number, blob, None, MOST_COUNT))
            who.ask(messages.Announce(epoch, number, MOST_COUNT))
            for question in (ListVersions(), DescribeVersion(number), DescribeVersion()):
                who.ask(question)
            who.post(Unpublish())
            who.post(HandOver())
    assert isinstance(ask(server.address, GetStatus(), timeout_s=20), StatusReply)
    assert "internal error" not in server.log
    with RawClient(server.address) as third:
        assert isinstance(third.hello(model=secrets.token_hex(8)), Welcome)
        assert isinstance(third.publish(1), Published | Failure)  # a server that listens has still to hear from others


def numbers(kind: object) -> Iterator[Any]:
    """Yield the places of bounded numbers in a type, each as a function that puts one in an otherwise legal value."""
    if get_origin(kind) is Annotated:
        inner, meta = get_args(kind)
        if inner is int:
            yield lambda number: (number, meta.le)
    elif get_origin(kind) is tuple and len(set(get_args(kind))) == 1:
        for place in numbers(get_args(kind)[0]):
            yield lambda number, place=place: ([place(number)[0]] * 2, place(number)[1])
    elif get_origin(kind) is not None:
        for argument in get_args(kind):
            yield from numbers(argument)


FIELDS = [
    (struct_, name, place)
    for struct_ in get_args(Request)
    for name, kind in get_type_hints(struct_, include_extras=True).items()
    for place in numbers(kind)
]


def test_numbers_of_requests_are_bounded() -> None:
    plain = {
        (kind.__name__, name)
        for kind in (*get_args(Request), Held, Ended)
        for name, hint in get_type_hints(kind).items()
        if hint is int and not any(numbers(get_type_hints(kind, include_extras=True)[name]))
    }
    assert plain == {("Hello", "protocol"), ("Hello", "shard"), ("Hello", "num_shards")}, "those are checked by name"
    assert len(FIELDS) >= 20


@pytest.mark.parametrize(("kind", "name", "place"), FIELDS, ids=[f"{k.__name__}.{name}" for k, name, _ in FIELDS])
@pytest.mark.parametrize("number", [-1, "above", 2**64 - 1])
def test_numbers_out_of_bounds_are_refused(
    server: ServerProcess, kind: type[msgspec.Struct], name: str, place: Any, number: int | str
) -> None:
    value, most = place(0)
    value = place(most + 1 if number == "above" else number)[0]
    with RawClient(server.address) as client:
        # A field of a wrong value is found before one that is missing.
        body = msgspec.msgpack.encode({"type": kind.__name__, name: value})
        client.socket.send_multipart([struct.pack(">2sHQ", MAGIC, PROTOCOL, 9), body])
        number_of_reply, reply = client.receive()
        assert (number_of_reply, type(reply)) == (9, Failure)
        assert f"$.{name}" in reply.message
        assert isinstance(client.hello(observer=True), Welcome)


def test_a_server_epoch_that_no_server_has_stops_none(server: ServerProcess) -> None:
    with RawClient(server.address) as client:
        for epoch in (MOST_SERVER_EPOCH + 1, MOST_COUNT):
            reply = client.ask(Hello(PROTOCOL, "t", "m", "r", server_epoch=epoch))
            assert isinstance(reply, Failure)
        assert isinstance(client.hello(observer=True), Welcome)
