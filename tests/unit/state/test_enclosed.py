"""Blobs that come with a promise, so that its reader need not ask for them."""

from __future__ import annotations

import pytest

from tensorhub_core.state import blobs
from tensorhub_core.state.messages import (
    Blob,
    Committed,
    Discard,
    Done,
    Filling,
    GetBlob,
    LeaseFailure,
    LeaseLost,
    Ok,
    Promise,
    Published,
    Relocate,
)
from tests.sim.hub import Hub, Peer, digest
from tests.unit.state.fleet import publish, replica, replicate, sums, unpublish


def place(peer: Peer) -> bytes:
    return b"placement of " + peer.session


def told(peer: Peer, number: int) -> tuple[bytes, ...]:
    return peer.answer(peer.join(number), Promise).blobs


def test_a_promise_brings_where_its_source_lies_and_the_checksums() -> None:
    hub = Hub()
    (trainer,), (reader,) = replica(hub, "trainer"), replica(hub, "reader")
    publish([trainer], 1)
    assert told(reader, 0) == (place(trainer), sums(1, 0)), "the layout is the reader's own"
    assert reader.call(GetBlob(digest(place(trainer))), Blob).data == place(trainer)


def test_what_a_reader_has_does_not_come_again() -> None:
    hub = Hub()
    (trainer,), (reader,) = replica(hub, "trainer"), replica(hub, "reader")
    publish([trainer], 1)
    assert replicate([reader]) == 1
    unpublish([trainer])
    unpublish([reader])
    publish([trainer], 2)
    assert told(reader, 1) == (sums(2, 0),)


def test_what_a_reader_asked_for_does_not_come_but_what_it_sent_does() -> None:
    hub = Hub()
    (trainer,), (reader,) = replica(hub, "trainer"), replica(hub, "reader")
    publish([trainer], 1)
    reader.call(GetBlob(digest(place(trainer))), Blob)
    reader.put(sums(1, 0))
    assert told(reader, 0) == (sums(1, 0),), "it sent them, and may have kept nothing"


def test_the_layout_of_another_layout_comes_too_and_each_once() -> None:
    hub = Hub()
    trainers = replica(hub, "trainer", 2)
    for peer in trainers:
        peer.register(b"half %d" % peer.shard)
    publish(trainers, 1)
    (reader,) = replica(hub, "reader")
    reader.register(b"all of it")
    found = told(reader, 0)
    wanted = [(place(peer), sums(1, peer.shard), b"half %d" % peer.shard) for peer in trainers]
    assert sorted(found) == sorted(data for each in wanted for data in each)


def test_other_sources_bring_what_they_name() -> None:
    hub = Hub()
    (trainer,), (other,), (reader,) = replica(hub, "trainer"), replica(hub, "other"), replica(hub, "reader")
    publish([trainer], 1)
    number = reader.join(0)
    lease = reader.answer(number, Promise).sources[0].lease
    replicate([other])
    reader.call(Filling(0), Ok)
    unpublish([trainer])
    again = reader.ask(Relocate(0, (LeaseFailure(lease, "lost"),)))
    promise = reader.answer(again, Promise)
    assert ([source.replica for source in promise.sources], promise.blobs) == (["other"], (place(other),))


def test_bytes_to_be_read_again_come_with_what_their_sources_name() -> None:
    hub = Hub()
    (trainer,), (other,), (reader,) = replica(hub, "trainer"), replica(hub, "other"), replica(hub, "reader")
    publish([trainer], 1)
    reader.answer(reader.join(0), Promise)
    reader.call(Filling(0), Ok)
    replicate([other])
    hub.later(0.0)
    hub.hello("trainer")  # another life of the trainer: the leases on the first one end
    assert reader.pushed(LeaseLost)
    discard = reader.answer(reader.ask(Done(0, reader.put(sums(1, 0)))), Discard)
    assert discard.blobs == (place(other),)
    reader.call(Filling(0), Ok)
    reader.answer(reader.ask(Done(0, digest(sums(1, 0)))), Committed)


def test_a_large_blob_is_left_out_and_a_smaller_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MOST_ENCLOSED_BYTES", 30)
    hub = Hub()
    trainer, reader = hub.hello("trainer"), hub.hello("reader")
    trainer.register(b"layout")
    reader.register(b"layout")
    trainer.publish(1, b"s" * 31, Published)
    assert told(reader, 0) == (place(trainer),)
    assert reader.call(GetBlob(digest(b"s" * 31)), Blob).data == b"s" * 31


def test_what_a_worker_has_is_remembered_of_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    (reader,) = replica(hub, "reader")
    for number in range(200):
        reader.call(GetBlob(reader.put(b"blob %d" % number)), Blob)
    (worker,) = hub.state.workers.values()
    assert list(worker.has) == [digest(b"blob %d" % number) for number in range(136, 200)]
