"""What a worker had created counts after a restart of the server, also when nobody holds it any more (law L10)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import Failure, Held, Leave, Ok, Promise, Published
from tests.sim.hub import Hub, Peer

RESTARTED_S = 6.0


def trainer(hub: Hub, replica: str = "trainer", **about: object) -> Peer:
    peer = hub.hello(replica, **about)
    peer.register(b"layout")
    return peer


@pytest.mark.parametrize("stream", [None, "run"])
def test_a_trainer_between_two_versions_goes_on_in_its_epoch(stream: str | None) -> None:
    hub = Hub(server_epoch=2)
    peer = trainer(hub, stream=stream, created=(1, 10))
    hub.later(RESTARTED_S)
    for older in (0, 9, 10):
        assert peer.publish(older, b"sums %d" % older, Failure).code == "version_conflict"
    assert peer.publish(11, b"sums 11", Published) == Published(1, 11)
    assert check(hub.state) == []


def test_what_was_created_but_never_whole_is_nothing_to_wait_for() -> None:
    hub = Hub(server_epoch=2)
    trainer(hub, stream="run", created=(1, 10)).call(Leave(), Ok)
    old = Held(1, 9, *(hub.hello("writer").put(part) for part in (b"layout", b"placement", b"sums")), 400, 4)
    hub.hello("holder", held=old)
    reader = trainer(hub, "reader")
    asked = reader.join(0)
    hub.later(RESTARTED_S)
    assert reader.answer(asked, Promise).number == 9


def test_a_newer_stream_takes_the_place_of_an_older_one_whoever_comes_back_first() -> None:
    for first in ("old", "new"):
        hub = Hub(server_epoch=2)
        about = {"old": {"stream": "old", "created": (1, 10)}, "new": {"stream": "new", "created": (2, 3)}}
        peers = {name: trainer(hub, name, **about[name]) for name in sorted(about, key=lambda n: n != first)}
        hub.later(RESTARTED_S)
        refused = peers["old"].publish(11, b"old sums", Failure)
        assert refused.code == "version_conflict"
        assert "is over" in refused.message
        assert peers["new"].publish(4, b"new sums", Published) == Published(2, 4)


def test_a_stream_is_over_for_who_hears_of_a_newer_one_from_its_readers() -> None:
    hub = Hub(server_epoch=2)
    old = trainer(hub, "old", stream="old", created=(1, 10))
    hub.hello("reader", high=(2, 3))
    hub.later(RESTARTED_S)
    assert old.publish(11, b"old sums", Failure).code == "version_conflict"
    assert trainer(hub, "new", stream="new").publish(0, b"new sums", Published) == Published(3, 0)


def test_a_stream_is_over_for_who_has_heard_of_a_newer_one_itself() -> None:
    hub = Hub(server_epoch=2)
    old = trainer(hub, "old", stream="old", created=(1, 10), high=(2, 3))
    hub.later(RESTARTED_S)
    assert "is over" in old.publish(11, b"old sums", Failure).message


def test_a_version_that_one_shard_had_published_stays_invisible_after_a_restart() -> None:
    hub = Hub(server_epoch=2)
    blobs = [hub.hello("writer").put(part) for part in (b"layout", b"placement", b"sums")]
    hub.hello("holder", held=Held(1, 9, *blobs, 400, 4), high=(1, 9))
    half = hub.hello("trainer", 1, 2, held=Held(1, 10, *blobs, 400, 4), created=(1, 10))
    other = hub.hello("trainer", 0, 2, created=(1, 9))
    reader = trainer(hub, "reader")
    asked = reader.join(0)
    hub.later(RESTARTED_S)
    assert reader.answer(asked, Promise).number == 9
    assert half.publish(9, b"older", Failure).code in ("version_conflict", "state_error")
    other.register(b"other layout")
    other.publish(10, b"sums of the other", Published)
    assert hub.state.models["policy"].high == (1, 10)  # type: ignore[index]
    assert check(hub.state) == []
