"""The client's round machine: connections that are lost and servers that forget."""

from __future__ import annotations

from tensorhub_core.client.reading import ReadEnd
from tensorhub_core.client.rounds import (
    Abandon,
    Advance,
    Answered,
    Ask,
    Begin,
    Broken,
    End,
    Plan,
    Planned,
    Pushed,
    Read,
    ReadEnded,
    Reopened,
    RoundState,
    Settle,
    Stop,
    Tell,
    Withdraw,
    Withdrawn,
)
from tensorhub_core.errors import (
    DeadlineExceeded,
    StateError,
)
from tensorhub_core.state.messages import (
    Committed,
    Done,
    Filling,
    JoinRound,
    LeaseFailure,
    LeaseLost,
    NothingNewer,
    Ok,
    Relocate,
    SourceProgress,
    Welcome,
)
from tests.unit.client.round_driver import CANCELLED, VERIFIED, Driver, ended, only, outcome, source, updating


def reopened(next_round: int = 0) -> Reopened:
    return Reopened(Welcome("w2.1", 2, 1, next_round, 1, 5.0, 1.0))


def test_a_lost_connection_while_joining_joins_again() -> None:
    driver = updating()
    driver.feed(Begin())
    assert driver.feed(reopened(9)) == [Ask(2, JoinRound(3, None, "update", (1, 6), True, again=True))], (
        "the same round"
    )
    assert driver.feed(Answered(1, NothingNewer(3, 1, 6))) == [], "the answer to an older request does not count"


def test_a_running_read_goes_on_over_a_restart_under_the_same_memory() -> None:
    driver = Driver().to_reading()
    ask = only(driver.feed(reopened()), Ask)
    assert ask.message == JoinRound(3, None, "replicate", None, True, promised=(1, 7), again=True), (
        "whoever has forgotten it hears it"
    )
    effects = driver.promise(source("n1"))
    assert effects == [Tell(Filling(3)), Advance("l1", 4, True)]
    assert driver.feed(Pushed(SourceProgress("n1", 4, True))) == [Advance("l1", 4, True)]
    assert driver.feed(Pushed(LeaseLost(3, "n1", "gone"))) == [Abandon("l1", "gone")]
    failed = ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "lost"))
    assert only(driver.feed(failed), Ask).message == Relocate(3, (LeaseFailure("n1", "lost"),))


def test_a_read_from_several_sources_goes_on_when_the_restart_names_them_in_another_order() -> None:
    driver = Driver()
    driver.feed(Begin())
    driver.promise(source("l1", "a"), source("l2", "b"))
    driver.feed(Planned())
    driver.feed(reopened())
    effects = driver.promise(source("n2", "b"), source("n1", "a", False, 2))
    assert effects == [Tell(Filling(3)), Advance("l2", 4, True), Advance("l1", 2, False)]
    assert driver.feed(Pushed(SourceProgress("n1", 3, False))) == [Advance("l1", 3, False)]
    assert driver.feed(Pushed(LeaseLost(3, "n2", "gone"))) == [Abandon("l2", "gone")]
    failed = ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l2", "lost"))
    assert only(driver.feed(failed), Ask).message == Relocate(3, (LeaseFailure("n2", "lost"),))
    assert driver.promise(source("n3", "a")) == [Plan(True)], "what is verified is kept"


def test_a_read_is_planned_again_when_the_restart_names_fewer_sources() -> None:
    driver = Driver()
    driver.feed(Begin())
    driver.promise(source("l1", "a"), source("l2", "b"))
    driver.feed(Planned())
    driver.feed(reopened())
    assert driver.promise(source("n1", "a")) == [Stop()]
    assert driver.feed(ReadEnded(outcome(ReadEnd.CANCELLED, done=50))) == [Plan(True)]


def test_a_running_read_is_planned_again_when_the_restart_names_other_memory() -> None:
    driver = Driver().to_reading()
    driver.feed(reopened())
    assert driver.promise(source("n1", "b")) == [Stop()]
    assert driver.feed(CANCELLED) == [Plan(True)]
    assert only(driver.feed(Planned()), Ask).message == Filling(3)


def test_a_read_that_ends_before_the_new_promise_is_not_repeated() -> None:
    driver = Driver().to_reading()
    driver.feed(reopened())
    assert driver.feed(VERIFIED) == []
    assert driver.promise(source("n1")) == [Plan(True)]
    driver.feed(Planned())
    assert driver.answer(Ok()) == [Read()], "the driver finds nothing left to read"
    assert driver.feed(VERIFIED) == [Settle()]


def test_a_commit_lost_with_the_connection_is_found_again() -> None:
    driver = Driver().to_confirming()
    ask = only(driver.feed(reopened(4)), Ask)
    assert ask.message == JoinRound(3, None, "update", None, True, promised=(1, 7), again=True)
    assert driver.answer(NothingNewer(3, 1, 7)) == [End(key=(1, 7), published=True)]


def test_a_done_lost_with_the_connection_is_asked_again_without_reading_again() -> None:
    driver = Driver().to_confirming()
    driver.feed(reopened())
    effects = driver.promise(source("n1"))
    assert effects == [Tell(Filling(3)), Ask(driver.state.asked, Done(3, b"digest"))]
    assert driver.answer(Committed(3, True)) == [End(key=(1, 7), published=True)]


def test_a_withdrawal_that_ends_after_a_lost_connection_is_not_repeated() -> None:
    driver = updating()
    driver.feed(Begin())
    driver.promise()
    assert driver.feed(Planned()) == [Withdraw()]
    driver.feed(reopened())
    driver.promise(source("n1"))
    assert driver.feed(Planned()) == [], "it is still being withdrawn"
    assert only(driver.feed(Withdrawn()), Ask).message == Filling(3)


def test_nothing_is_overwritten_after_a_restart_before_the_new_server_knows() -> None:
    driver = Driver()
    driver.feed(Begin())
    assert driver.promise() == [Plan(True)]
    driver.feed(reopened())
    assert driver.promise(source("n1")) == [Plan(True)]
    assert driver.feed(Planned()) == [Ask(driver.state.asked, Filling(3))]
    assert driver.answer(Ok()) == [Read()]


def test_a_session_that_is_over_ends_the_round_at_once_or_after_the_read() -> None:
    error = StateError("another process took its place")
    driver = Driver().to_reading()
    assert driver.feed(Broken(error))[-1] == Stop()
    assert ended(driver.feed(CANCELLED)).error is error


def test_a_failed_withdrawal_leaves_the_memory_as_it_was() -> None:
    driver = updating()
    driver.feed(Begin())
    driver.promise()
    driver.feed(Planned())
    error = DeadlineExceeded("readers")
    end = ended(driver.feed(Withdrawn(error)))
    assert end.error is error
    assert not end.dirty


def test_another_version_may_be_promised_after_a_restart_and_is_read_instead() -> None:
    driver = Driver().to_reading()
    driver.feed(reopened())
    assert driver.promise(source("n1", "b"), number=8) == [Stop()]
    assert driver.feed(CANCELLED) == [Plan(True)], "the driver sees that these are other bytes"
    assert only(driver.feed(Planned()), Ask).message == Filling(3)


def test_what_may_have_been_committed_is_withdrawn_before_another_version_overwrites_it() -> None:
    driver = Driver().to_confirming()
    driver.feed(reopened(4))
    assert driver.promise(source("n1", "b"), number=8) == [Plan(True)]
    assert driver.feed(Planned()) == [Withdraw()]
    assert only(driver.feed(Withdrawn()), Ask).message == Filling(3)


def test_an_explicit_version_is_never_replaced_by_another() -> None:
    driver = Driver(RoundState(3, 7, "replicate", None, True, 100.0, False)).to_reading()
    driver.feed(reopened())
    assert driver.promise(number=8)[-1] == Stop()
    assert isinstance(ended(driver.feed(CANCELLED)).error, StateError)
