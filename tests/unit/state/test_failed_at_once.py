"""A round that fails as soon as its first shard has called: the calls of all shards still meet (L2)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import Ended, Failure, Hello, Ok, Promise, Published, Welcome
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_next_round import group


def again(peer: Peer, ended: int) -> int:
    """Say hello again, as after each call that was promised nothing; return the round that the shard is welcomed to."""
    hello = Hello(1, f"reader {peer.shard}", "policy", "reader", peer.shard, 2, high=(1, 3), ended=Ended(ended, None))
    return peer.call(hello, Welcome).next_round


def failed(hub: Hub) -> tuple[list[Peer], list[Peer]]:
    """Let both shards hear in round 0 that there is no holder, and the first one again in round 1."""
    trainers, readers = group(hub, "trainer"), group(hub, "reader")
    for peer in trainers:
        peer.publish(3, b"three %d" % peer.shard, Published)
    for peer in trainers:
        peer.answer(peer.unpublish(), Ok)
    for reader in readers:
        reader.answer(reader.join(0), Failure)
    first, _ = readers
    assert again(first, 0) == 1
    first.answer(first.join(1), Failure)
    return trainers, readers


def test_the_other_shard_hears_that_too_and_not_the_next_promise() -> None:
    """It would wait for a shard that is not coming, with its memory withdrawn, and the trainer would wait for it."""
    hub = Hub(retain=0)
    trainers, (first, second) = failed(hub)
    for peer in trainers:
        peer.publish(4, b"four %d" % peer.shard, Published)
    assert again(second, 0) == 1
    second.answer(second.join(1), Failure)
    assert (again(first, 1), again(second, 1)) == (2, 2)
    asked = [peer.join(2) for peer in (first, second)]
    assert {peer.answer(number, Promise).number for peer, number in zip((first, second), asked, strict=True)} == {4}
    assert check(hub.state) == []


@pytest.mark.parametrize("when", ["joined", "later"])
def test_who_did_not_make_that_call_meets_the_others_in_the_next_one(when: str) -> None:
    hub = Hub(retain=0)
    trainers, (first, second) = failed(hub)
    if when == "joined":
        for peer in trainers:
            peer.publish(4, b"four %d" % peer.shard, Published)
        assert again(first, 1) == 2
        first.join(2)
    else:
        hub.now += 2.0
    assert again(second, 0) == 2
