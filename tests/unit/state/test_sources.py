"""Which copies a reader of their own layout is leased: the best one, and beside it only what costs nobody anything."""

from __future__ import annotations

import pytest

from tensorhub_core.ids import CopyId, Digest, ReplicaName
from tensorhub_core.schedule.sources import MOST_RAW_SOURCES, Candidate, Place, choose_more
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    LeaseFailure,
    LeaseLost,
    Leave,
    Ok,
    Promise,
    Published,
    Relocate,
)
from tests.sim.hub import Hub, Peer

A, SUMS = b"layout a", b"sums 1"
HERE = Place("zone", "host")


def holder(hub: Hub, name: str, **more: object) -> Peer:
    peer = hub.hello(name, **more)
    peer.register(A)
    peer.publish(1, SUMS, Published)
    return peer


def reader(hub: Hub, name: str = "reader", **more: object) -> tuple[Peer, Promise]:
    peer = hub.hello(name, **more)
    peer.register(A)
    promise = peer.answer(peer.join(0), Promise)
    assert check(hub.state) == []
    return peer, promise


def replicas(promise: Promise | Discard) -> set[str]:
    return {source.replica for source in promise.sources}


@pytest.mark.parametrize(("holders", "leased"), [(1, 1), (2, 2), (3, 3), (6, MOST_RAW_SOURCES)])
def test_idle_holders_are_leased_together(holders: int, leased: int) -> None:
    hub = Hub()
    for number in range(holders):
        holder(hub, f"holder {number}")
    _, promise = reader(hub)
    assert len(promise.sources) == len(replicas(promise)) == leased
    assert len({source.sums for source in promise.sources}) == 1


def test_a_chain_stays_a_chain_behind_one_publisher() -> None:
    hub = Hub()
    holder(hub, "trainer")
    peers = [reader(hub, f"reader {number}") for number in range(1)]
    for number in range(1, 8):
        peers[-1][0].call(Filling(0), Ok)
        peers[-1][0].call(Announce(0, 1), Ok)
        peers.append(reader(hub, f"reader {number}"))
    assert replicas(peers[0][1]) == {"trainer"}
    for number in range(1, 8):
        assert replicas(peers[number][1]) == {f"reader {number - 1}"}


def test_holders_that_are_read_are_not_taken_besides() -> None:
    hub = Hub()
    for name in ("one", "two", "three"):
        holder(hub, name)
    _, first = reader(hub, "first")
    assert len(first.sources) == 3
    second, promise = reader(hub, "second")
    assert len(promise.sources) == 1, "nobody is idle and whole any more"
    assert second.session in hub.peers


def candidate(copy: str = "c", zone: str = "zone", host: str = "host", load: int = 0, **more: object) -> Candidate:
    sums = more.pop("sums", Digest(b"s"))
    place = Place(zone, host)
    return Candidate(CopyId(copy), ReplicaName(copy), Digest(b"l"), place, load, sums, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        candidate("d", load=1),
        candidate("d", depth=1),
        candidate("d", draining=True),
        candidate("d", zone="elsewhere"),
        candidate("d", host="another"),
        candidate("d", sums=Digest(b"t")),
    ],
    ids=["read by others", "unfinished", "draining", "another zone", "farther", "other bytes"],
)
def test_what_could_harm_or_slow_down_is_not_taken_besides(other: Candidate) -> None:
    best = candidate()
    assert choose_more(HERE, best, [best, other]) == []
    assert choose_more(HERE, best, [other, candidate("e"), best]) == [candidate("e")]


def test_a_best_source_on_another_machine_is_joined_by_any_of_its_zone() -> None:
    best = candidate(host="far")
    assert choose_more(HERE, best, [best, candidate("d", host="far too")]) == [candidate("d", host="far too")]


def test_a_whole_copy_goes_before_one_that_fills() -> None:
    hub = Hub()
    holder(hub, "trainer")
    filling, _ = reader(hub)
    filling.call(Filling(0), Ok)
    filling.call(Announce(0, 2), Ok)
    holder(hub, "whole")
    assert replicas(reader(hub, "late")[1]) == {"whole"}
    filling.call(Done(0, filling.put(SUMS)), Committed)
    assert replicas(reader(hub, "later")[1]) == {"reader", "trainer"}, "what is finished is whole"


def test_when_one_of_several_goes_the_others_stay_and_the_prefix_is_kept() -> None:
    hub = Hub()
    peers = {name: holder(hub, name) for name in ("one", "two", "three")}
    filling, promise = reader(hub)
    filling.call(Filling(0), Ok)
    filling.call(Announce(0, 2), Ok)
    follower, followed = reader(hub, "follower")
    assert replicas(followed) == {"reader"}
    peers["two"].call(Leave(), Ok)
    lost = filling.pushed(LeaseLost)
    assert [each.lease for each in lost] == [s.lease for s in promise.sources if s.replica == "two"]
    again = filling.call(Relocate(0, (LeaseFailure(lost[0].lease, "lost"),)), Promise)
    assert replicas(again) == {"one", "three"}
    assert follower.pushed(LeaseLost) == [], "the same bytes: whoever follows goes on"
    filling.call(Announce(0, 3), Ok)
    assert check(hub.state) == []
    filling.call(Done(0, filling.put(SUMS)), Committed)


def test_one_that_failed_is_left_out_and_the_others_stay() -> None:
    hub = Hub()
    for name in ("one", "two", "three"):
        holder(hub, name)
    peer, promise = reader(hub)
    peer.call(Filling(0), Ok)
    bad = promise.sources[1]
    again = peer.call(Relocate(0, (LeaseFailure(bad.lease, "corrupt"),)), Promise)
    assert replicas(again) == replicas(promise) - {bad.replica}


def test_who_gave_wrong_bytes_is_named_in_the_log() -> None:
    hub = Hub()
    for name in ("one", "two"):
        holder(hub, name)
    peer, promise = reader(hub)
    peer.call(Filling(0), Ok)
    wrong = promise.sources[1]
    peer.call(Done(0, peer.put(SUMS), (wrong.lease, "l0.0")), Committed)
    assert [text for text in hub.logs if "wrong bytes" in text] == [
        f"reader/0 got wrong bytes from {wrong.replica}, and right ones elsewhere"
    ]


def test_done_asks_for_every_lease() -> None:
    hub = Hub()
    peers = [holder(hub, name) for name in ("one", "two")]
    peer, promise = reader(hub)
    assert len(promise.sources) == 2
    peer.call(Filling(0), Ok)
    peers[1].call(Leave(), Ok)
    discard = peer.call(Done(0, peer.put(SUMS)), Discard)
    assert replicas(discard) == {"one"}
    peer.call(Done(0, peer.put(SUMS)), Committed)


def test_a_slow_source_is_better_than_none() -> None:
    hub = Hub()
    for name in ("one", "two"):
        holder(hub, name)
    peer, promise = reader(hub)
    peer.call(Filling(0), Ok)
    slow, dead = promise.sources
    again = peer.call(Relocate(0, (LeaseFailure(slow.lease, "slow"),)), Promise)
    assert replicas(again) == {dead.replica}
    back = peer.call(Relocate(0, (LeaseFailure(again.sources[0].lease, "lost"),)), Promise)
    assert replicas(back) == {slow.replica}
    failed = peer.call(Relocate(0, (LeaseFailure(back.sources[0].lease, "lost"),)), Failure)
    assert failed.code == "version_unavailable"


def test_who_finds_no_source_is_told_who_is_just_withdrawing_the_version() -> None:
    hub = Hub()
    trainer = holder(hub, "trainer")
    reader(hub, "early")
    unpublished = trainer.unpublish()
    late = hub.hello("late")
    late.register(A)
    failure = late.answer(late.join(0), Failure)
    assert unpublished not in trainer.answers
    assert failure.code == "version_unavailable"
    assert failure.message.endswith("being withdrawn by trainer")
