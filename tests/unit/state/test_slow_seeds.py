"""A seed that is far slower than the link is left for another one, one at a time; a slow link is nobody's fault."""

from __future__ import annotations

from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import Announce, Filling, LeaseFailure, Leave, Ok, Relocate, SourceSlow
from tests.unit.state.test_seeds import Zones

FAST, SLOW = 20, 1
"""Bytes that come in half a second."""
TOTAL = 400


class Link(Zones):
    """Some replicas that have crossed before are done and idle; the trainer has published the next version."""

    def __init__(self, *rates: int) -> None:
        super().__init__()
        self.done: dict[str, int] = {}
        for number, rate in enumerate(rates):
            name = f"before{number}"
            self.reader(name, zone="far")
            self.begin(name)
            self.done[name] = TOTAL - 8 * rate  # it has brought the rest along
            self.run({name: rate}, 8)
            self.end(name)
            self.hub.later(0.5)
            self.peers[name].call(Leave(), Ok)
        self.asked.clear()

    def begin(self, *names: str) -> None:
        for name in names:
            self.peers[name].call(Filling(0), Ok)
            self.done[name] = 0

    def run(self, rates: dict[str, int], times: int = 12) -> None:
        """Let bytes come for half a second, several times."""
        for _ in range(times):
            self.hub.later(0.5)
            for name, rate in rates.items():
                self.done[name] += rate
                self.peers[name].call(Announce(0, 0, self.done[name]), Ok)
            assert check(self.hub.state) == []

    def told(self, name: str) -> list[SourceSlow]:
        return self.peers[name].pushed(SourceSlow)

    def follow(self, name: str) -> str | None:
        """Do as a reader does that was told to leave its source."""
        told = self.told(name)[-1]
        self.asked[name] = self.peers[name].ask(Relocate(0, (LeaseFailure(told.lease, "slow"),)))
        return self.source(name)

    def run_until_told(self, rates: dict[str, int]) -> str:
        """Let bytes come until somebody is told to leave its source; returns who."""
        for _ in range(30):
            self.run(rates, 1)
            told = [name for name in rates if self.told(name)]
            if told:
                (name,) = told
                return name
        raise AssertionError("nobody was told")


def test_one_of_those_that_follow_a_slow_seed_crosses_for_the_rest() -> None:
    link = Link(FAST)
    for name in ("one", "two", "three"):
        link.reader(name)
    link.reader("other", b"b")
    assert (link.crossing(), link.source("other")) == ({"one"}, None)
    link.begin("one", "two", "three")
    first = link.run_until_told({"one": SLOW, "two": SLOW, "three": SLOW})
    assert first in ("two", "three"), "who follows it"
    assert "less than the link gives" in link.told(first)[0].reason
    assert link.follow(first) == "trainer"
    assert link.crossing() == {"one", first}
    (last,) = {"two", "three"} - {first}
    link.run({"one": SLOW, first: FAST, last: SLOW}, 8)
    assert link.follow(last) == first
    assert link.follow("one") in (first, last), "the slow one is no seed any more"
    assert link.crossing() == {first}
    link.run({"one": FAST, first: FAST, last: FAST}, 8)
    link.end(first)
    assert link.source("other") == first


def test_one_of_those_that_wait_for_a_slow_seed_crosses_for_the_rest() -> None:
    link = Link(FAST)
    link.reader("one")
    link.reader("two", b"b")
    link.reader("three", b"b")
    link.begin("one")
    link.run({"one": SLOW})
    assert link.source("two") == "trainer"
    assert link.source("three") is None
    assert link.crossing() == {"one", "two"}


def test_a_link_that_has_become_slow_is_not_the_seeds_fault() -> None:
    """It is found out at the cost of one more that crosses, and known the next time."""
    link = Link(FAST, SLOW)
    for name in ("one", "two"):
        link.reader(name)
    link.reader("other", b"b")
    link.begin("one", "two")
    link.run({"one": SLOW, "two": SLOW}, 20)
    assert not link.told("two")
    assert link.source("other") is None
    assert link.crossing() == {"one"}


def test_who_is_no_faster_shows_that_the_link_is_the_limit() -> None:
    link = Link(FAST)
    for name in ("one", "two", "three"):
        link.reader(name)
    link.begin("one", "two", "three")
    first = link.run_until_told({"one": SLOW, "two": SLOW, "three": SLOW})
    assert link.follow(first) == "trainer"
    (last,) = {"two", "three"} - {first}
    link.run({"one": SLOW, first: SLOW, last: SLOW}, 10)
    if link.told(last):
        assert link.follow(last) == first
    told = {name: len(link.told(name)) for name in link.peers}
    link.run({"one": SLOW, first: SLOW, last: SLOW}, 20)
    assert {name: len(link.told(name)) for name in link.peers} == told
    assert link.crossing() == {"one", first}


def test_a_seed_is_not_compared_with_itself() -> None:
    """One that was fast before, and is slow today, has nobody who shows that the link is not."""
    link = Link(FAST)
    for name in ("before0", "two"):
        link.reader(name)
    link.begin("before0", "two")
    link.run({"before0": SLOW, "two": SLOW}, 20)
    assert not link.told("two")
    assert link.crossing() == {"before0"}


def test_only_so_many_links_and_times_are_remembered() -> None:
    link = Link(*[FAST] * 6)
    (rates,) = link.hub.state.flows.rates.values()
    assert [name for name, _ in rates] == ["before2", "before3", "before4", "before5"]
    assert all(FAST < rate < 5 * FAST for _, rate in rates)
