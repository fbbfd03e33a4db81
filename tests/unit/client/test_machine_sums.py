"""What a round does when a source does not vouch for parts of what it holds."""

from __future__ import annotations

import pytest

from tensorhub_core.client.moves import content
from tensorhub_core.client.reading import ReadEnd
from tensorhub_core.client.rounds import Abandon, Ask, Plan, Planned, Pushed, Read, ReadEnded, Reopened, Stop, Unvouched
from tensorhub_core.state.messages import LeaseFailure, LeaseLost, Relocate, Welcome
from tests.unit.client.round_driver import CANCELLED, VERIFIED, Driver, only, outcome, source


def test_a_source_that_gives_no_sums_is_read_on_in_whole_segments() -> None:
    driver = Driver().to_reading()
    assert driver.feed(Unvouched("l1", "unable", "it is too old")) == [Stop()]
    assert driver.state.inexact == {content(source())}
    assert driver.feed(CANCELLED) == [Plan(True)]
    assert driver.feed(Planned()) == [Read()]
    assert driver.state.relocations == driver.state.fruitless == 0, "it failed nobody"


def test_it_is_stopped_for_that_once() -> None:
    driver = Driver().to_reading()
    driver.feed(Unvouched("l1", "unable", "why"))
    assert driver.feed(Unvouched("l1", "unable", "why")) == []
    driver.feed(CANCELLED)
    assert driver.feed(Unvouched("l1", "unable", "late")) == []
    driver.feed(Planned())
    assert driver.feed(Unvouched("l1", "unable", "again")) == []


def test_a_read_that_was_over_by_then_counts() -> None:
    driver = Driver().to_reading()
    driver.feed(Unvouched("l1", "unable", "why"))
    assert driver.feed(VERIFIED) != []
    assert driver.state.complete


def test_changed_bytes_are_the_fault_of_their_source() -> None:
    driver = Driver().to_reading()
    assert driver.feed(Unvouched("l1", "corrupt", "segment 3")) == [Abandon("l1", "segment 3", "corrupt")]
    effects = driver.feed(ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "corrupt")))
    assert only(effects, Ask).message == Relocate(3, (LeaseFailure("l1", "corrupt"),))
    assert not driver.state.inexact


@pytest.mark.parametrize("kind", ["unable", "corrupt"])
def test_what_comes_when_nothing_is_read_is_ignored(kind: str) -> None:
    driver = Driver().to_reading()
    driver.feed(Reopened(Welcome("w", 2, 1, 0, 1, 1.0, 1.0)))
    assert driver.feed(Unvouched("l1", kind, "why")) == [], "the promise comes first"
    other = Driver().to_reading()
    other.feed(Pushed(LeaseLost(3, "l1", "gone")))
    other.feed(ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "lost")))
    assert other.feed(Unvouched("l1", kind, "why")) == []


def test_only_its_own_memory_is_affected_also_under_another_lease() -> None:
    driver = Driver()
    driver.to_reading()
    driver.feed(Unvouched("l9", "unable", "a lease of before"))
    assert not driver.state.inexact
    driver.feed(Reopened(Welcome("w", 2, 1, 0, 1, 1.0, 1.0)))
    driver.promise(source("l2"))
    assert driver.feed(Unvouched("l1", "unable", "why")) == [Stop()], "the read knows it by the old lease"
    assert driver.state.inexact == {content(source("l2"))}
