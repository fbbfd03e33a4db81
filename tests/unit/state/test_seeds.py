"""One reader of a zone fetches a version from another zone; the others follow it, or wait where they cannot."""

from __future__ import annotations

import pytest

from tensorhub_core.state import seeds as seeding
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Discard,
    Done,
    Filling,
    LeaseFailure,
    LeaseLost,
    Leave,
    LeaveRound,
    Ok,
    Promise,
    Published,
    Relocate,
    SourceSlow,
    Unpublish,
)
from tests.sim.hub import Hub, Peer

SUMS = {b"a": b"sums of a", b"b": b"sums of b"}


class Zones:
    """A trainer of layout a in one zone, readers in another; `waits_for` names who has no promise yet."""

    def __init__(self, **config: object) -> None:
        self.hub = Hub(**config)
        self.trainer = self.holder("trainer", "home")
        self.asked: dict[str, int] = {}
        self.peers: dict[str, Peer] = {}

    def holder(self, name: str, zone: str, layout: bytes = b"a", **more: object) -> Peer:
        peer = self.hub.hello(name, zone=zone, **more)
        peer.register(layout)
        peer.publish(1, SUMS[layout], Published, **({} if name == "trainer" else {"held_epoch": 1}))
        return peer

    def reader(self, name: str, layout: bytes = b"a", zone: str = "far", host: str = "", **join: object) -> Peer:
        peer = self.hub.hello(name, zone=zone, host=host)
        peer.register(layout)
        self.peers[name], self.asked[name] = peer, peer.join(0, **join)
        assert check(self.hub.state) == []
        return peer

    def source(self, name: str) -> str | None:
        """Return whom a reader was sent to; None while it waits."""
        peer = self.peers[name]
        if self.asked[name] not in peer.answers:
            return None
        (source,) = peer.answer(self.asked[name], Promise).sources
        return source.replica

    def fill(self, name: str, prefix: int) -> None:
        self.peers[name].call(Filling(0), Ok)
        self.peers[name].call(Announce(0, prefix, 100 * prefix), Ok)

    def end(self, name: str, layout: bytes = b"a") -> bool:
        peer = self.peers[name]
        published = peer.call(Done(0, peer.put(SUMS[layout])), Committed).published
        assert check(self.hub.state) == []
        return published

    def relocate(self, name: str, kind: str = "lost") -> str | None:
        """Let a reader ask for another source instead of the one it was sent to."""
        peer = self.peers[name]
        lease = peer.answer(self.asked[name], Promise).sources[0].lease
        self.asked[name] = peer.ask(Relocate(0, (LeaseFailure(lease, kind),)))  # type: ignore[arg-type]
        assert check(self.hub.state) == []
        return self.source(name)

    def crossing(self) -> set[str]:
        """Return who of the far zone reads from another zone now."""
        model = self.hub.state.models["policy"]  # type: ignore[index]
        leases = [lease for ids in model.index.crossing.values() for lease in ids]
        return {self.hub.state.workers[self.hub.state.leases[lease].reader].replica for lease in leases}


def test_the_others_follow_the_seed_while_it_fills_however_small_the_copy() -> None:
    zones = Zones(worth_waiting_bytes=1 << 30)
    for name in ("one", "two", "three"):
        zones.reader(name)
    assert [zones.source(name) for name in ("one", "two", "three")] == ["trainer", "one", "one"]
    assert zones.crossing() == {"one"}


@pytest.mark.parametrize("how", ["another layout", "offered at its end"])
def test_who_cannot_follow_waits_for_the_seed_to_be_whole(how: str) -> None:
    zones = Zones()
    zones.reader("one", prefix=how == "another layout")
    zones.reader("two", b"b" if how == "another layout" else b"a")
    assert (zones.source("one"), zones.source("two")) == ("trainer", None)
    zones.fill("one", 3)
    zones.hub.later(2.0)
    assert zones.source("two") is None
    assert zones.end("one")
    assert zones.source("two") == "one"
    assert zones.crossing() == set()


def test_a_whole_copy_of_another_layout_in_the_zone_is_better_than_ones_own_across() -> None:
    zones = Zones()
    zones.holder("near", "far", b"b")
    zones.reader("one", b"a")
    assert zones.source("one") == "near"


@pytest.mark.parametrize("how", ["keeps it for itself", "has a layout of its own"])
def test_nobody_waits_for_who_offers_nothing_that_could_be_read(how: str) -> None:
    zones = Zones()
    if how == "keeps it for itself":
        zones.reader("one", offer=False)
    else:
        peer = zones.hub.hello("one", zone="far")
        peer.register(b"b", portable=False)
        zones.hub.hello("other", zone="home").register(b"b", portable=False)
        other = next(p for p in zones.hub.peers.values() if p.name == "other/0")
        other.publish(1, SUMS[b"b"], Published, held_epoch=1)
        zones.peers["one"], zones.asked["one"] = peer, peer.join(0)
    zones.reader("two")
    assert zones.source("two") == "trainer"
    assert zones.crossing() == {"one", "two"}


@pytest.mark.parametrize("how", ["dies", "leaves the round", "does not begin", "does not come on"])
def test_no_wait_for_a_seed_is_for_ever(how: str) -> None:
    zones = Zones()
    one, config = zones.reader("one"), zones.hub.config
    zones.reader("two", b"b")
    zones.reader("three", b"b")
    if how != "does not begin":
        zones.fill("one", 2)
    assert (zones.source("two"), zones.source("three")) == (None, None)
    if how == "dies":
        zones.hub.later(config.lease_s + 1.5, silent=(one,))
    elif how == "leaves the round":
        one.call(LeaveRound(0, "deadline_exceeded", ""), Ok)
    else:
        zones.hub.later(config.begin_within_s + 1.5 if how == "does not begin" else config.advance_within_s + 1.5)
    assert zones.source("two") == "trainer"
    assert zones.source("three") is None, "one at a time"
    assert check(zones.hub.state) == []


def test_the_one_that_has_verified_most_takes_the_place_of_a_seed_that_died() -> None:
    zones = Zones()
    seed = zones.reader("seed", host="host")
    zones.fill("seed", 3)
    for name in ("low", "high"):
        zones.reader(name, host="host")
        assert zones.source(name) == "seed"
    zones.fill("low", 1)
    zones.fill("high", 2)
    zones.reader("other", b"b")
    zones.hub.later(zones.hub.config.lease_s + 1.5, silent=(seed,))
    assert all(zones.peers[name].pushed(LeaseLost) for name in ("low", "high"))
    assert zones.relocate("low") is None, "another one has more of it"
    assert zones.relocate("high") == "trainer"
    assert zones.source("low") == "high"
    assert zones.source("other") is None
    assert zones.crossing() == {"high"}
    copies = {zones.hub.state.workers[c.worker].replica: c.prefix for c in zones.hub.state.copies.values()}
    assert (copies["low"], copies["high"]) == (1, 2), "they keep what they have verified"
    zones.end("high")
    zones.end("low")
    assert zones.source("other") in ("low", "high")


def test_nobody_waits_long_for_one_that_has_verified_more_and_says_nothing() -> None:
    zones = Zones()
    seed = zones.reader("seed", host="host")
    zones.fill("seed", 3)
    for name in ("low", "high"):
        zones.reader(name, host="host")
    zones.fill("low", 1)
    zones.fill("high", 2)
    zones.hub.later(zones.hub.config.lease_s + 1.5, silent=(seed,))
    assert zones.relocate("low") is None
    zones.hub.later(zones.hub.config.begin_within_s + 1.5)
    assert zones.source("low") == "trainer"
    assert zones.relocate("high") == "low"
    assert zones.crossing() == {"low"}


def test_a_seed_that_loses_its_source_stays_the_seed() -> None:
    zones = Zones()
    second = zones.holder("second", "home")
    zones.reader("one")
    zones.fill("one", 2)
    zones.reader("two", b"b")
    first = zones.peers["one"].answer(zones.asked["one"], Promise).sources
    assert {source.replica for source in first} == {"trainer", "second"}
    assert second
    for source in first:
        zones.peers["one"].ask(Relocate(0, (LeaseFailure(source.lease, "lost"),)))
        break
    assert zones.crossing() == {"one"}
    assert zones.source("two") is None


def test_a_slow_link_between_zones_is_no_slow_reader() -> None:
    zones = Zones()
    zones.reader("one")
    zones.holder("idle", "home", host="elsewhere")
    zones.reader("beside", zone="home", host="elsewhere")
    done = {"one": 0, "beside": 0}
    for name in done:
        zones.peers[name].call(Filling(0), Ok)
    for _ in range(20):
        zones.hub.later(0.5)
        for name, rate in (("one", 1), ("beside", 15)):
            done[name] += rate
            zones.peers[name].call(Announce(0, 0, done[name]), Ok)
    assert zones.peers["one"].pushed(SourceSlow) == []


def test_unknown_zones_are_not_waited_in() -> None:
    zones = Zones()
    zones.reader("one", zone="")
    zones.reader("two", b"b", zone="")
    assert zones.source("two") == "trainer"


def test_a_publisher_may_leave_when_its_seeds_are_served() -> None:
    zones = Zones()
    zones.reader("one")
    zones.fill("one", 1)
    zones.reader("two", b"b")
    request = zones.trainer.ask(Unpublish())
    zones.end("one")
    zones.trainer.answer(request, Ok)
    assert zones.source("two") == "one"


def test_without_the_rule_for_the_best_mark_the_first_to_ask_would_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "orphans_of", lambda *_: ())
    with pytest.raises(AssertionError):
        test_the_one_that_has_verified_most_takes_the_place_of_a_seed_that_died()


def test_who_waited_for_any_seed_would_wait_for_one_that_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "will_serve", lambda s, seed, reader, current: seed.replica != reader.replica)
    with pytest.raises(AssertionError):
        test_nobody_waits_for_who_offers_nothing_that_could_be_read("keeps it for itself")


def test_who_has_read_all_and_lost_its_source_is_nobodys_source_before_it_was_told_that_it_counts() -> None:
    """Its `Done` is discarded, and so would be those of all that follow it: two such ones kept each other busy."""
    zones = Zones()
    zones.reader("one")
    zones.fill("one", 4)
    zones.holder("second", "home")
    zones.trainer.call(Leave(), Ok)
    zones.reader("two")
    assert zones.source("two") is None
    one = zones.peers["one"]
    (again,) = one.call(Done(0, one.put(SUMS[b"a"])), Discard).sources
    assert again.replica == "second"
    assert zones.source("two") == "one"
    zones.end("one")
