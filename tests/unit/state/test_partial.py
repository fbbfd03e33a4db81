"""Copies without a manifest: readers of another layout announce checksums, and are followed by those (law L12)."""

from __future__ import annotations

import pytest

from tensorhub_core.state.bounds import MOST_CUTS
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    Held,
    LeaseFailure,
    LeaseLost,
    Ok,
    Promise,
    Published,
    Relocate,
    RoundAborted,
    Source,
    SourceProgress,
    SourceSlow,
)
from tests.sim.hub import Hub, Peer

TRAINER, ENGINE = b"trainer's layout", b"engine's layout"
SEGMENTS = 4
LARGE = {"worth_waiting_bytes": 100 * SEGMENTS}


def packed(count: int = SEGMENTS, first: int = 0, base: int = 1000) -> bytes:
    """Return the checksums of some segments."""
    return b"".join((base + n).to_bytes(8, "little") for n in range(first, first + count))


def trainer(hub: Hub, replica: str = "trainer", content: bytes = b"trainer's sums", **more: object) -> Peer:
    peer = hub.hello(replica, **more)
    peer.register(TRAINER)
    peer.publish(1, content, Published)
    return peer


def engine(hub: Hub, replica: str, segments: int = SEGMENTS, **more: object) -> Peer:
    peer = hub.hello(replica, **{"announces_sums": True, **more})
    peer.register(ENGINE, segments)
    return peer


def world(engines: int, **config: float) -> tuple[Hub, Peer, list[Peer]]:
    hub = Hub(**{**LARGE, **config})
    return hub, trainer(hub), [engine(hub, f"e{number}") for number in range(engines)]


def promised(peer: Peer, number: int = 0) -> Source:
    (found,) = peer.answer(number, Promise).sources
    return found


def begin(peer: Peer, **more: object) -> Source:
    found = promised(peer, peer.join(0))
    peer.call(Filling(0, **more), Ok)
    return found


def announce(peer: Peer, prefix: int, first: int = 0, base: int = 1000, done_bytes: int | None = None) -> None:
    done_bytes = 100 * prefix if done_bytes is None else done_bytes
    peer.call(Announce(0, prefix, done_bytes, packed(prefix - first, first, base)), Ok)
    assert check(peer.hub.state) == []


def done(peer: Peer, sums: bytes | None = None) -> None:
    peer.call(Done(0, peer.put(packed() if sums is None else sums)), Committed)
    assert check(peer.hub.state) == []


def moved(peer: Peer, lease: str, kind: str = "lost") -> Source:
    return promised(peer, peer.ask(Relocate(0, (LeaseFailure(lease, kind),))))  # type: ignore[arg-type]


def test_engines_of_one_layout_that_ask_at_the_same_moment_form_a_chain() -> None:
    hub, _, engines = world(8)
    asked = [each.join(0) for each in engines]
    found = [promised(*pair) for pair in zip(engines, asked, strict=True)]
    assert [each.replica for each in found] == ["trainer", *(f"e{n}" for n in range(7))]
    assert [each.partial for each in found] == [False, *[True] * 7]
    assert check(hub.state) == []


def test_a_follower_hears_checksums_with_the_prefix_and_announces_only_how_far_it_is() -> None:
    _, _, (a, b, c) = world(3)
    begin(a)
    announce(a, 1)
    at_a = begin(b)
    assert (at_a.replica, at_a.sums, at_a.whole, at_a.prefix, at_a.known) == ("e0", b"", False, 1, packed(1))
    at_b = begin(c)
    announce(a, 3, first=1)
    assert b.pushed(SourceProgress) == [SourceProgress(at_a.lease, 3, False, 1, packed(2, 1))]
    b.call(Announce(0, 2, 200), Ok)
    assert c.pushed(SourceProgress) == [SourceProgress(at_b.lease, 2, False, 0, packed(2))]
    b.call(Announce(0, 4, 400), Ok)
    assert c.pushed(SourceProgress)[-1] == SourceProgress(at_b.lease, 3, False, 2, packed(1, 2)), (
        "no more than is known"
    )
    done(a)
    assert b.pushed(SourceProgress)[-1] == SourceProgress(at_a.lease, 4, True, 4)
    done(b)
    assert c.pushed(SourceProgress)[-1] == SourceProgress(at_b.lease, 4, True, 4)
    done(c)


def test_what_is_said_again_counts_once_and_what_is_missing_before_says_nothing() -> None:
    _, _, (a, b) = world(2)
    begin(a)
    at_a = begin(b)
    announce(a, 3, first=1)
    assert b.pushed(SourceProgress) == []
    announce(a, 2)
    announce(a, 2)
    announce(a, 3, first=1)
    assert [each.prefix for each in b.pushed(SourceProgress)] == [2, 3]
    assert promised(b, b.join(0, again=True)).known == packed(3)
    assert promised(b, b.next_request - 1).lease == at_a.lease


@pytest.mark.parametrize("how", ["announces", "is done"])
def test_who_contradicts_itself_ends_its_round_and_nobody_follows_it(how: str) -> None:
    hub, _, (a, b) = world(2)
    begin(a)
    at_a = begin(b)
    announce(a, 2)
    if how == "announces":
        a.call(Announce(0, 3, 300, packed(2, 1, base=5000)), Ok)
        assert a.pushed(RoundAborted)[-1].code == "corrupt_transfer"
    else:
        assert a.call(Done(0, a.put(packed(base=5000))), Failure).code == "corrupt_transfer"
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [at_a.lease]
    assert moved(b, at_a.lease).replica == "trainer"
    assert check(hub.state) == []


def test_the_rest_of_the_checksums_comes_with_the_end_in_messages_of_bounded_size() -> None:
    count = 2 * MOST_CUTS + 5
    hub = Hub(worth_waiting_bytes=0)
    trainer(hub)
    a, b = (engine(hub, name, count) for name in ("a", "b"))
    begin(a)
    at_a = begin(b)
    done(a, packed(count))
    heard = b.pushed(SourceProgress)
    assert [each.prefix for each in heard[:3]] == [MOST_CUTS, 2 * MOST_CUTS, count]
    assert b"".join(each.sums for each in heard) == packed(count)
    assert heard[-1].whole
    assert not any(each.whole for each in heard[:2])
    assert {each.lease for each in heard} == {at_a.lease}


def test_with_the_first_gone_the_next_one_reads_the_publisher_and_the_others_stay_behind_it() -> None:
    hub, _, (a, b, c, d) = world(4)
    begin(a)
    at_a, at_b, at_c = begin(b), begin(c), begin(d)
    announce(a, 2)
    b.call(Announce(0, 1, 100), Ok)
    hub.later(hub.config.dead_after_s + 2, silent=(a,))
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [at_a.lease]
    assert moved(b, at_a.lease).replica == "trainer"
    assert [lost.lease for lost in c.pushed(LeaseLost)] == [at_b.lease], "what b offered came from a"
    assert d.pushed(LeaseLost) == [], "it had got nothing yet"
    again = moved(c, at_b.lease)
    assert (again.replica, again.prefix, again.known) == ("e1", 0, b"")
    announce(b, 2, base=7000)
    assert c.pushed(SourceProgress)[-1].sums == packed(2, base=7000)
    c.call(Announce(0, 1, 100), Ok)
    assert d.pushed(SourceProgress)[-1] == SourceProgress(at_c.lease, 1, False, 0, packed(1, base=7000))
    assert check(hub.state) == []


def test_a_follower_that_finds_the_same_checksums_elsewhere_keeps_its_own_followers() -> None:
    hub, _, (a, b, c) = world(3)
    begin(a)
    at_a, at_b = begin(b), begin(c)
    announce(a, 2)
    b.call(Announce(0, 2, 200), Ok)
    other = engine(hub, "other")
    other.publish(1, packed(), Published, held_epoch=1)
    found = moved(b, at_a.lease, "stalled")
    assert (found.replica, found.partial) == ("other", False)
    assert c.pushed(LeaseLost) == []
    b.call(Announce(0, 4, 400), Ok)
    assert c.pushed(SourceProgress)[-1] == SourceProgress(at_b.lease, 4, False, 2, packed(2, 2))
    done(b)
    done(c)


def test_a_follower_that_finds_other_checksums_elsewhere_loses_its_own_followers() -> None:
    hub, _, (a, b, c) = world(3)
    begin(a)
    at_a, at_b = begin(b), begin(c)
    announce(a, 2)
    b.call(Announce(0, 2, 200), Ok)
    engine(hub, "other").publish(1, packed(base=4000), Published, held_epoch=1)
    assert moved(b, at_a.lease, "stalled").replica == "other"
    assert [lost.lease for lost in c.pushed(LeaseLost)] == [at_b.lease]
    assert check(hub.state) == []


def test_the_first_one_keeps_its_followers_at_a_publisher_of_the_same_bytes_only() -> None:
    hub, _, (a, b) = world(2)
    first = begin(a)
    at_a = begin(b)
    announce(a, 2)
    trainer(hub, "same")
    found = moved(a, first.lease, "stalled")
    assert found.replica == "same"
    assert b.pushed(LeaseLost) == []
    announce(a, 3, first=2)
    assert b.pushed(SourceProgress)[-1].prefix == 3
    other = hub.hello("other")
    other.register(b"a third layout")
    other.publish(1, b"its sums", Published, held_epoch=1)
    assert moved(a, found.lease, "stalled").replica == "other"
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [at_a.lease]
    assert check(hub.state) == []


def test_what_did_not_count_is_announced_anew() -> None:
    hub, t, (a, b) = world(2)
    begin(a)
    at_a = begin(b)
    announce(a, 2)
    trainer(hub, "same")
    hub.later(hub.config.dead_after_s + 2, silent=(t,))
    discarded = a.call(Done(0, a.put(packed())), Discard)
    assert [source.replica for source in discarded.sources] == ["same"]
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [at_a.lease]
    again = moved(b, at_a.lease)
    assert (again.replica, again.known) == ("e0", b"")
    announce(a, 2, base=3000)
    assert b.pushed(SourceProgress)[-1].sums == packed(2, base=3000)


def test_a_silent_one_offers_nothing_that_it_announced() -> None:
    hub, _, (a, b) = world(2)
    begin(a)
    at_a = begin(b)
    announce(a, 2)
    hub.later(hub.config.lease_s + 2, silent=(a,))
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [at_a.lease]
    assert hub.state.known_bytes == 0
    assert check(hub.state) == []


@pytest.mark.parametrize("what", ["follower", "first"])
def test_who_does_not_announce_checksums_neither_follows_nor_is_followed(what: str) -> None:
    hub, _, _ = world(0)
    a = engine(hub, "a", announces_sums=what == "follower")
    b = engine(hub, "b", announces_sums=what == "first")
    begin(a)
    announce(a, 2)
    assert promised(b, b.join(0)).replica == "trainer"


@pytest.mark.parametrize("how", [{"offer": False}, {"prefix": False}])
def test_what_is_not_offered_before_it_is_complete_is_not_followed(how: dict[str, bool]) -> None:
    _, _, (a, b) = world(2)
    promised(a, a.join(0, **how))
    a.call(Filling(0), Ok)
    announce(a, 2)
    assert promised(b, b.join(0)).replica == "trainer"


def test_a_reader_that_may_convert_is_followed_when_it_is_known_whether_it_does() -> None:
    hub, _, _ = world(0)
    a, b, c = (engine(hub, name, casts=True) for name in "abc")
    a.join(0)
    assert promised(b, b.join(0)).replica == "trainer"
    a.call(Filling(0, converted=True), Ok)
    announce(a, 1)
    at_a = promised(c, c.join(0))
    assert (at_a.replica, at_a.partial, at_a.converted) == ("a", True, True)
    assert check(hub.state) == []


def test_many_shards_are_followed_shard_by_shard_although_one_asks_first() -> None:
    hub = Hub(**LARGE)
    trainer(hub)
    first, second = ([hub.hello(name, k, 2, announces_sums=True) for k in range(2)] for name in ("first", "second"))
    for group in (first, second):
        for k, peer in enumerate(group):
            peer.register(ENGINE + b"%d" % k)
    for peer in first:
        peer.join(0)
    for peer in first:
        peer.call(Filling(0), Ok)
    asked = [second[0].join(0), second[1].join(0)]
    found = [promised(*pair) for pair in zip(second, asked, strict=True)]
    assert [(each.replica, each.shard, each.partial) for each in found] == [("first", 0, True), ("first", 1, True)]


def test_a_server_that_has_restarted_hears_all_of_it_again() -> None:
    _, t, (a, b) = world(2)
    begin(a)
    begin(b)
    announce(a, 2)
    after = Hub(server_epoch=2, **LARGE)
    held = Held(1, 1, t.put(TRAINER), t.put(b"placement of " + t.session), t.put(b"trainer's sums"), 400, SEGMENTS)
    back = after.hello("trainer", held=held, high=(1, 1))
    for data in (TRAINER, b"trainer's sums"):
        back.put(data)
    c, d = (engine(after, name, high=(1, 1)) for name in ("e0", "e1"))
    asked = [each.join(0, promised=(1, 1), again=True) for each in (c, d)]
    after.later(after.config.grace_s + 1)
    assert promised(c, asked[0]).replica == "trainer"
    at_c = promised(d, asked[1])
    assert (at_c.replica, at_c.partial, at_c.known) == ("e0", True, b"")
    c.call(Filling(0), Ok)
    announce(c, 2)
    assert d.pushed(SourceProgress)[-1] == SourceProgress(at_c.lease, 2, False, 0, packed(2))


def test_who_does_not_come_on_is_left_by_one_after_the_other_who_then_are_a_chain() -> None:
    hub, _, (a, b, c) = world(3)
    begin(a)
    begin(b)
    begin(c)
    announce(a, 1)
    b.call(Announce(0, 1, 100), Ok)
    c.call(Announce(0, 1, 100), Ok)
    hub.later(hub.config.advance_within_s - 2)
    assert b.pushed(SourceSlow) == []
    hub.later(4)
    (told,) = b.pushed(SourceSlow)
    assert "has not come on" in told.reason
    assert moved(b, told.lease, "slow").replica == "trainer"
    (lost,) = c.pushed(LeaseLost)
    assert moved(c, lost.lease).replica == "e1"
    announce(b, 1)
    for number in range(10):
        hub.later(2)
        announce(b, 1, done_bytes=101 + number)
    assert c.pushed(SourceSlow) == [], "its own source comes on"
    (newcomer,) = [engine(hub, "newcomer")]
    assert promised(newcomer, newcomer.join(0)).replica == "e2"


def test_nobody_is_blamed_for_waiting_for_its_source() -> None:
    hub, t, (a, b, c) = world(3)
    begin(a)
    begin(b)
    begin(c)
    for number in range(15):
        hub.later(2)
        announce(a, 1, done_bytes=number + 1)
    assert a.pushed(SourceSlow) == b.pushed(SourceSlow) == c.pushed(SourceSlow) == []
    announce(a, 4)
    hub.later(hub.config.advance_within_s - 2)
    assert c.pushed(SourceSlow) == [], "its source could not come on before"
    assert t.pushed(SourceSlow) == []


def test_there_is_an_end_to_what_is_remembered_of_announced_checksums() -> None:
    hub, _, (a, b) = world(2, max_blob_bytes=1 << 20)
    begin(a)
    begin(b)
    hub.state.known_bytes = (1 << 20) - 16
    a.call(Announce(0, 4, 400, packed()), Ok)
    assert b.pushed(SourceProgress) == []
    a.call(Announce(0, 2, 200, packed(2)), Ok)
    assert b.pushed(SourceProgress)[-1].prefix == 2
    assert hub.state.known_bytes == 1 << 20
    hub.state.known_bytes = 16
    assert check(hub.state) == []


def test_who_comes_back_to_sources_of_another_layout_offers_nothing_by_its_old_manifest() -> None:
    hub = Hub(**LARGE)
    holder, a, b = (hub.hello(name) for name in ("holder", "a", "b"))
    for peer in (holder, a, b):
        peer.register(ENGINE)
    holder.publish(1, packed(), Published)
    begin(a)
    a.call(Announce(0, 2, 200), Ok)
    at_a = begin(b)
    other = hub.hello("other")
    other.register(TRAINER)
    other.publish(1, b"trainer's sums", Published, held_epoch=1)
    hub.later(hub.config.dead_after_s + 2, silent=(holder,))
    assert promised(a, a.join(0, again=True)).replica == "other"
    assert [lost.lease for lost in b.pushed(LeaseLost)] == [at_a.lease]
    assert check(hub.state) == []
