"""Who counts as a holder while a round is open, and where somebody who comes late is sent."""

from __future__ import annotations

import pytest

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Done,
    Failure,
    Filling,
    LeaseLost,
    ListVersions,
    Ok,
    Promise,
    Published,
    Relocate,
    Versions,
)
from tests.sim.hub import Hub, Peer
from tests.unit.state.test_rounds import A, publish, trainer


def holders(peer: Peer) -> list[list[str]]:
    """Return who holds each version whole, as anyone is told."""
    return [list(row.replicas) for row in peer.call(ListVersions(), Versions).rows]


def source(reader: Peer, number: int) -> str:
    (found,) = reader.answer(number, Promise).sources
    return found.replica


def half_done_chain(hub: Hub, readers: int) -> list[Peer]:
    """Let readers follow each other, all of them half done."""
    (t,) = trainer(hub)
    publish([t], 1)
    chain = [trainer(hub, f"r{number}")[0] for number in range(readers)]
    for number, reader in enumerate(chain):
        assert source(reader, reader.join(0)) == ("trainer" if number == 0 else f"r{number - 1}")
        reader.call(Filling(0), Ok)
        reader.call(Announce(0, 2, 200), Ok)
    return chain


def loads(hub: Hub) -> list[int]:
    return sorted(len(copy.leases) for copy in hub.state.copies.values())


@pytest.mark.parametrize("late", [1, 2, 4])
def test_who_comes_half_way_is_sent_to_the_end_of_the_chain(late: int) -> None:
    """Nobody gets a second reader, and nobody is told to change, so nobody is slowed down."""
    hub = Hub()
    chain = half_done_chain(hub, 8)
    expected = "r7"
    for number in range(late):
        (peer,) = trainer(hub, f"late {number}")
        asked = peer.join(0)
        assert source(peer, asked) == expected
        assert peer.answer(asked, Promise).sources[0].prefix == (2 if number == 0 else 0), "what is there can be read"
        peer.call(Filling(0), Ok)
        expected = f"late {number}"
    assert loads(hub) == [0] + [1] * (8 + late)
    assert all(not reader.pushed(LeaseLost) for reader in chain)
    assert check(hub.state) == []


def test_who_comes_half_way_takes_a_whole_idle_copy_where_there_is_one() -> None:
    hub = Hub()
    chain = half_done_chain(hub, 8)
    idle = hub.hello("idle")
    idle.register(A + b"0")
    idle.publish(1, b"sums 1 0", Published, held_epoch=1)
    (late,) = trainer(hub, "late")
    assert source(late, late.join(0)) == "idle"
    assert all(not reader.pushed(LeaseLost) for reader in chain)


def broken_pair(hub: Hub) -> tuple[list[Peer], list[Peer], list[Peer], list[Promise], int]:
    """Shard 0 of a pair has finished version 1 and serves shard 0 of the next replica; shard 1 of the pair fills.

    The last value is the number of the finished shard's `Done`.
    """
    t, pair, after = (trainer(hub, name, shards=2) for name in ("trainer", "pair", "after"))
    publish(t, 1)
    for shard, peer in enumerate(pair):
        peer.answer(peer.join(0), Promise)
        peer.call(Filling(0), Ok)
        peer.call(Announce(0, 2, 200), Ok)
        if shard == 0:
            finished = peer.ask(Done(0, peer.put(b"sums 1 0")))
    asked = [peer.join(0) for peer in after]
    promises = [peer.answer(number, Promise) for peer, number in zip(after, asked, strict=True)]
    return t, pair, after, promises, finished


def test_a_finished_shard_serves_its_shards_readers_while_its_round_is_open_and_is_no_holder() -> None:
    hub = Hub()
    t, pair, after, promises, finished = broken_pair(hub)
    (of_pair,) = promises[0].sources
    assert (of_pair.replica, of_pair.shard, of_pair.prefix) == ("pair", 0, 4)
    assert holders(t[0]) == [["trainer"]]
    hub.later(hub.config.dead_after_s + 1.0, silent=(pair[1],))
    assert [lost.lease for lost in after[0].pushed(LeaseLost)] == [of_pair.lease]
    assert pair[0].answer(finished, Failure).code == "state_error"
    assert holders(t[0]) == [["trainer"]]
    for shard, peer in enumerate(after):
        assert peer.call(Relocate(0, ()), Promise).sources[0].replica == "trainer"
        peer.call(Filling(0), Ok)
        peer.ask(Done(0, peer.put(b"sums 1 %d" % shard)))
    assert holders(t[0]) == [["after", "trainer"]]
    assert check(hub.state) == []


def test_what_only_half_of_a_broken_replica_has_is_gone_with_the_others() -> None:
    hub = Hub()
    t, pair, after, _, _ = broken_pair(hub)
    hub.later(60.0, silent=(*pair[1:], *after))
    for peer in t:
        peer.answer(peer.unpublish(), Ok)
    late = trainer(hub, "late", shards=2)
    asked = [peer.join(0, 1) for peer in late]
    assert [peer.answer(n, Failure).code for peer, n in zip(late, asked, strict=True)] == ["version_unavailable"] * 2
    assert holders(t[0]) == []
    assert check(hub.state) == []
