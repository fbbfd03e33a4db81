"""Comparing sources alone, under a clock that the test moves."""

from __future__ import annotations

import pytest

from tensorhub_core.client.pace import JUDGED_S, STRAGGLER_SHARE, Pace, patience_s, straggler, worthwhile

KIB = 1 << 10
FAR = 30.0


class Link:
    """A source that gives batches of one size in order, with so many in flight."""

    def __init__(self, bytes_per_s: float, batch: int = 256 * KIB, depth: int = 4) -> None:
        self.pace, self.bytes_per_s, self.batch = Pace(), bytes_per_s, batch
        self.flying = depth
        self.free_s = 0.0
        for _ in range(depth):
            self.pace.posted(batch, 0.0)

    def until(self, now: float) -> None:
        """Give what comes until a time."""
        while self.free_s + self.batch / self.bytes_per_s <= now:
            self.free_s += self.batch / self.bytes_per_s
            self.pace.ended(self.batch, self.free_s)
            self.pace.posted(self.batch, self.free_s)


def judged_at(rates: list[float], seconds: float = FAR, **more: int) -> tuple[int, float] | None:
    """Return who is called a straggler first, and when."""
    links = [Link(rate, **more) for rate in rates]
    for step in range(int(seconds * 20)):
        now = step / 20
        for link in links:
            link.until(now)
        found = straggler([link.pace for link in links], now)
        if found is not None:
            return found, now
    return None


@pytest.mark.parametrize(
    ("unit", "batch"), [(30e3, 4), (30e3, 256), (30e3, 4096), (1e6, 256), (50e6, 1024), (50e6, 16384), (5e9, 65536)]
)
def test_living_sources_of_like_rates_are_never_stragglers(unit: float, batch: int) -> None:
    assert judged_at([unit, unit], batch=batch * KIB) is None
    assert judged_at([unit, 0.3 * unit, 0.2 * unit], batch=batch * KIB) is None


@pytest.mark.parametrize("rates", [[100e6, 4e6], [4e6, 100e6], [100e6, 90e6, 4e6], [10e9, 50e6]])
def test_one_that_is_far_slower_is_found_soon(rates: list[float]) -> None:
    found = judged_at(rates, batch=64 * KIB)
    assert found is not None
    assert found[0] == rates.index(min(rates))
    assert JUDGED_S <= found[1] < 2 * JUDGED_S + 0.1


def test_one_that_gives_nothing_is_found_though_it_owes_much() -> None:
    found = judged_at([100e6, 1e-9], batch=256 * KIB)
    assert found is not None
    assert found[0] == 1
    assert found[1] < 1.2


def test_sources_that_all_stop_are_not_compared() -> None:
    """Then it is the reader, or the wire."""
    links = [Link(50e6), Link(60e6)]
    for link in links:
        link.until(3.0)
    for step in range(60, 1200):
        assert straggler([link.pace for link in links], step / 20) is None


def test_one_that_becomes_slow_is_found_later() -> None:
    links = [Link(50e6), Link(50e6)]
    for link in links:
        link.until(10.0)
    links[1].bytes_per_s = 1e6
    for step in range(200, 280):
        for link in links:
            link.until(step / 20)
        if straggler([link.pace for link in links], step / 20) == 1:
            return
    pytest.fail("it was not found")


def test_time_in_which_nothing_was_asked_for_does_not_count() -> None:
    busy, idle = Link(10e6), Pace()
    for second in range(20):
        busy.until(second + 0.9)
        idle.posted(100_000, second + 0.0)
        idle.ended(100_000, second + 0.01)
        assert straggler([busy.pace, idle], second + 0.99) is None
    assert idle.rate(20.0) == pytest.approx(10e6)


def test_a_pause_of_this_process_is_not_the_sources_fault() -> None:
    links = [Link(10e6), Link(9e6)]
    for link in links:
        link.until(2.0)
    links[0].until(2.0)
    for link in links:
        link.pace.paused(100.0)
    assert straggler([link.pace for link in links], 100.9) is None


def test_a_single_source_is_compared_with_nobody() -> None:
    link = Link(1e-9)
    assert straggler([link.pace], 100.0) is None
    assert straggler([], 100.0) is None


def test_the_last_work_goes_to_those_who_will_have_done_it_first() -> None:
    fast, slow = Link(100e6, batch=1000, depth=1), Link(10e6, batch=1000, depth=1)
    for link in (fast, slow):
        link.until(0.5)
    assert worthwhile(slow.pace, [fast.pace], 100_000, 10_000_000, 0.5)
    assert not worthwhile(slow.pace, [fast.pace], 100_000, 200_000, 0.5)
    assert worthwhile(fast.pace, [slow.pace], 100_000, 200_000, 0.5)
    assert worthwhile(slow.pace, [], 100_000, 100_000, 0.5)
    assert worthwhile(Pace(), [fast.pace], 100_000, 100_000, 0.5), "of a new one nothing is known"


def test_somebody_is_always_worth_asking() -> None:
    rates = [1e6, 3e6, 100e6]
    links = [Link(rate, batch=10_000, depth=2) for rate in rates]
    for link in links:
        link.until(2.0)
    for left in (1, 1000, 100_000, 10**9):
        asked = [
            worthwhile(link.pace, [other.pace for other in links if other is not link], min(left, 10_000), left, 2.0)
            for link in links
        ]
        assert any(asked)


def test_patience_is_twice_what_the_others_would_need() -> None:
    fast = Link(100e6)
    fast.until(1.0)
    assert patience_s(100_000_000, [fast.pace], 1.0) == pytest.approx(0.25 + 2.0, rel=0.1)
    assert patience_s(100_000_000, [], 1.0) == 0.25


def test_the_share_is_an_eighth() -> None:
    assert STRAGGLER_SHARE == 1 / 8
    assert judged_at([8e6, 1.3e6], batch=KIB, depth=1) is None
    assert judged_at([8e6, 0.8e6], batch=KIB, depth=1) is not None
