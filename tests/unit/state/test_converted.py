"""Copies in other dtypes than the publisher's: who reads them, and that it stays known what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub_core.schedule.policy import AUTO
from tensorhub_core.state.messages import (
    Committed,
    DescribeVersion,
    Done,
    Failure,
    Filling,
    Held,
    Ok,
    Promise,
    Published,
    PutBlob,
    Source,
    VersionLayouts,
)
from tensorhub_core.state.requests import Publish
from tests.sim.hub import Hub, Peer, digest

TRAINER, ENGINE, OTHER = b"float32", b"bfloat16", b"bfloat16, cut otherwise"
CAST = b"sums of bfloat16"


def worker(hub: Hub, replica: str, layout: bytes, **more: object) -> Peer:
    peer = hub.hello(replica, **more)
    peer.register(layout)
    return peer


def sources(peer: Peer, number: int = 0) -> tuple[Source, ...]:
    return peer.answer(peer.join(number), Promise).sources


def done(peer: Peer, number: int = 0, sums: bytes = CAST, converted: bool = True) -> None:
    peer.call(Filling(number), Ok)
    peer.call(Done(number, peer.put(sums), converted=converted), Committed)


def fleet(hub: Hub) -> tuple[Peer, Peer]:
    """A trainer that published version 1, and an engine that converted it."""
    trainer, engine = worker(hub, "trainer", TRAINER), worker(hub, "engine", ENGINE)
    trainer.publish(1, b"sums of float32", Published)
    assert not sources(engine)[0].converted
    done(engine)
    return trainer, engine


def test_another_layout_reads_the_publisher_however_busy_and_far_it_is() -> None:
    hub = Hub(policy=replace(AUTO, one_seed=False))  # or the later ones would wait for the first
    trainer, engine = worker(hub, "trainer", TRAINER, zone="far"), worker(hub, "engine", ENGINE, zone="near")
    trainer.publish(1, b"sums of float32", Published)
    sources(engine)
    done(engine)
    for number in range(3):
        (source,) = sources(worker(hub, f"reader {number}", OTHER, zone="near"))
        assert (source.replica, source.converted) == ("trainer", False)


def test_the_same_layout_reads_what_was_converted_and_is_so_itself() -> None:
    hub = Hub()
    trainer, _ = fleet(hub)
    second, third = worker(hub, "second", ENGINE), worker(hub, "third", ENGINE)
    (source,) = sources(second)
    assert (source.replica, source.converted) == ("engine", True)
    second.call(Filling(0), Ok)
    assert hub.state.workers[hub.state.sessions[second.session]].filling().converted  # type: ignore[union-attr]
    second.call(Done(0, second.put(CAST), converted=True), Committed)
    assert all(source.converted for source in sources(third))
    trainer.unpublish()
    (source,) = sources(worker(hub, "late", OTHER))
    assert (source.replica in ("engine", "second"), source.converted) == (True, True)


def test_what_is_held_back_and_published_later_is_still_what_it_was() -> None:
    hub = Hub()
    trainer, engine = worker(hub, "trainer", TRAINER), worker(hub, "engine", ENGINE)
    trainer.publish(1, b"sums of float32", Published)
    engine.answer(engine.join(0, offer=False), Promise)
    engine.call(Filling(0), Ok)
    engine.call(Done(0, engine.put(CAST), converted=True), Committed)
    engine.call(Publish(1, digest(CAST), 1, converted=True), Published)
    assert [source.replica for source in sources(worker(hub, "reader", OTHER))] == ["trainer"]
    rows = hub.hello("looker", observer=True).call(DescribeVersion(1), VersionLayouts).layouts
    assert {row.replica: row.converted for row in rows} == {"trainer": False, "engine": True}


@pytest.mark.parametrize("converted", [True, False])
def test_a_restarted_server_hears_it_again(converted: bool) -> None:
    hub = Hub()
    blobs = {name: name + b" blob" for name in (b"layout", b"placement", b"sums")}
    held = Held(1, 1, *(digest(data) for data in blobs.values()), 400, 4, converted=converted)
    peer = hub.hello("engine", held=held)
    for data in blobs.values():
        peer.call(PutBlob(digest(data), data), Ok)
    hub.later(6.0)
    assert [source.converted for source in sources(worker(hub, "reader", OTHER))] == [converted]


def test_other_values_under_one_layout_name_what_may_be_the_reason() -> None:
    hub = Hub()
    fleet(hub)
    reader = worker(hub, "reader", ENGINE)
    sources(reader)
    reader.call(Filling(0), Ok)
    failure = reader.call(Done(0, reader.put(b"other sums"), converted=True), Failure)
    assert failure.code == "corrupt_transfer"
    assert "published other values in another dtype" in failure.message
