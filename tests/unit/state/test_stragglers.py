"""The server compares readers of single sources, and tells those whose source is far slower to leave it, once."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tensorhub_core.schedule.speed import WINDOW_S, Speed, is_slow
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Announce,
    Committed,
    Done,
    Filling,
    LeaseFailure,
    Ok,
    Promise,
    Published,
    Relocate,
    SourceSlow,
)
from tests.sim.hub import Hub, Peer

A, SUMS, SEGMENTS = b"layout a", b"sums 1", 1000


class Readers:
    """Readers on hosts of their own, each next to the holder it reads from."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.peers: dict[str, Peer] = {}
        self.sources: dict[str, Promise] = {}
        self.done: dict[str, int] = {}

    def holder(self, name: str) -> Peer:
        peer = self.hub.hello(name, host=name)
        peer.register(A, SEGMENTS)
        peer.publish(1, SUMS, Published)
        return peer

    def reader(self, name: str, beside: str) -> Peer:
        """Begin to read from the holder on one's host."""
        peer = self.hub.hello(name, host=beside)
        peer.register(A, SEGMENTS)
        self.sources[name] = peer.answer(peer.join(0), Promise)
        peer.call(Filling(0), Ok)
        self.peers[name], self.done[name] = peer, 0
        return peer

    def read(self, seconds: float, rates: Mapping[str, float]) -> None:
        """Let readers go on at their rates, in bytes per second."""
        for _ in range(int(2 * seconds)):
            self.hub.later(0.5)
            for name, rate in rates.items():
                self.done[name] += int(rate / 2)
                self.peers[name].call(Announce(0, self.done[name] // 100, self.done[name]), Ok)
            assert check(self.hub.state) == []

    def told(self, name: str) -> list[SourceSlow]:
        return self.peers[name].pushed(SourceSlow)

    def leave(self, name: str) -> Promise:
        """Do as told."""
        lease = self.told(name)[-1].lease
        self.sources[name] = self.peers[name].call(Relocate(0, (LeaseFailure(lease, "slow"),)), Promise)
        return self.sources[name]


@pytest.fixture
def two() -> Readers:
    readers = Readers()
    for name in ("fast", "slow"):
        readers.holder(name)
        readers.reader(f"from {name}", name)
        assert [source.replica for source in readers.sources[f"from {name}"].sources] == [name]
    return readers


def test_who_reads_far_more_slowly_than_others_is_told_so_once(two: Readers) -> None:
    two.read(2.5, {"from fast": 2000, "from slow": 100})
    assert two.told("from slow") == [], "a moment is no proof"
    two.read(3, {"from fast": 2000, "from slow": 100})
    (told,) = two.told("from slow")
    assert (told.round, told.lease) == (0, two.sources["from slow"].sources[0].lease)
    two.read(10, {"from fast": 2000, "from slow": 100})
    assert len(two.told("from slow")) == 1
    assert two.told("from fast") == []


def test_the_lease_stands_until_the_reader_leaves(two: Readers) -> None:
    two.read(6, {"from fast": 2000, "from slow": 100})
    assert two.told("from slow")
    slow = two.peers["from slow"]
    slow.call(Done(0, slow.put(SUMS)), Committed)


def test_who_leaves_gets_another_source_and_does_not_come_back(two: Readers) -> None:
    two.read(6, {"from fast": 2000, "from slow": 100})
    assert "slow" not in {source.replica for source in two.leave("from slow").sources}
    two.read(10, {"from fast": 2000, "from slow": 2000})
    assert len(two.told("from slow")) == 1


def test_who_stays_slow_is_slow_itself_and_is_left_in_peace(two: Readers) -> None:
    rates = {"from fast": 500, "from slow": 25}
    for number in range(3):
        two.holder(f"other {number}")
        two.reader(f"from other {number}", f"other {number}")
        rates[f"from other {number}"] = 500
    for _ in range(10):
        before = len(two.told("from slow"))
        two.read(6, rates)
        if len(two.told("from slow")) > before:
            two.leave("from slow")
    assert len(two.told("from slow")) == 2


@pytest.mark.parametrize("share", [1.0, 0.5, 0.15])
def test_like_rates_are_left_alone(two: Readers, share: float) -> None:
    two.read(15, {"from fast": 2000, "from slow": 2000 * share})
    assert two.told("from slow") == []


def test_nobody_is_told_to_leave_for_a_crowded_source() -> None:
    readers = Readers()
    readers.holder("slow")
    only = readers.reader("only", "slow")
    readers.read(10, {"only": 1})
    assert only.pushed(SourceSlow) == [], "nobody reads faster, and there is nothing else"


def test_one_that_follows_a_slow_reader_waits_for_it_to_move(two: Readers) -> None:
    two.reader("follower", "slow")
    assert [source.replica for source in two.sources["follower"].sources] == ["from slow"]
    two.read(10, {"from fast": 2000, "from slow": 100, "follower": 100})
    assert two.told("follower") == []
    assert len(two.told("from slow")) == 1


def test_one_that_had_nothing_to_read_for_a_while_does_not_blame_who_goes_on_now(two: Readers) -> None:
    """Its rate is still that of the time in which its source had nothing for it."""
    two.reader("follower", "slow")
    two.holder("other")
    both = {"from slow": 2000, "follower": 2000}
    two.read(4, {"from fast": 2000, **both})
    two.read(7, {"from fast": 2000, "from slow": 0, "follower": 0})
    assert two.told("from slow")
    two.leave("from slow")
    two.read(12, {"from fast": 2000, **both})
    assert two.told("follower") == []


def test_one_that_is_slow_itself_is_told_although_its_source_still_fills(two: Readers) -> None:
    two.reader("follower", "slow")
    two.holder("other")
    two.read(12, {"from fast": 2000, "from slow": 2000, "follower": 100})
    assert len(two.told("follower")) == 1


def test_a_reader_that_is_done_still_shows_what_can_be_had(two: Readers) -> None:
    two.read(1, {"from fast": 50_000, "from slow": 100})
    fast = two.peers["from fast"]
    fast.call(Done(0, fast.put(SUMS)), Committed)
    two.read(5, {"from slow": 100})
    assert len(two.told("from slow")) == 1


def test_bytes_that_a_reader_brings_along_are_no_speed() -> None:
    speed = Speed()
    speed.note(1_000_000, 10.0)
    speed.note(1_000_300, 10.0 + WINDOW_S)
    speed.measure(10.0 + WINDOW_S - 0.1)
    assert speed.bytes_per_s is None
    speed.measure(10.0 + WINDOW_S)
    assert speed.bytes_per_s == pytest.approx(100.0)


def test_an_unmeasured_copy_is_not_slow_and_none_is_slower_than_itself() -> None:
    fast, slow = Speed(800.0), Speed(99.0)
    assert is_slow(slow, [fast, slow])
    assert not is_slow(Speed(101.0), [fast, slow])
    assert not is_slow(Speed(), [fast])
    assert not is_slow(slow, [slow])
