"""The client's round machine: each race by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensorhub_core.client import machine, moves
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.rounds import (
    Abandon,
    Advance,
    Ask,
    Begin,
    Broken,
    End,
    Mode,
    Plan,
    PlanFailed,
    Planned,
    Pushed,
    Read,
    ReadEnded,
    RoundState,
    Settled,
    Stop,
    Tell,
    Tick,
    Withdraw,
    Withdrawn,
)
from tensorhub_core.errors import (
    CorruptTransfer,
    DeadlineExceeded,
    LayoutMismatch,
    StateError,
    TransportError,
    VersionUnavailable,
)
from tensorhub_core.state.bounds import MOST_DETAIL
from tensorhub_core.state.messages import (
    Committed,
    Discard,
    Done,
    Failure,
    Filling,
    JoinRound,
    LeaseFailure,
    LeaseLost,
    LeaveRound,
    NothingNewer,
    Ok,
    Promise,
    Relocate,
    Reply,
    RoundAborted,
    SourceProgress,
    SourceSlow,
)
from tensorhub_core.wire.codec import decode_request, encode, split
from tests.unit.client.round_driver import CANCELLED, VERIFIED, Driver, ended, holding, only, outcome, source, updating


def test_a_round_runs_from_promise_to_commit() -> None:
    driver = Driver()
    assert driver.feed(Begin()) == [Ask(1, JoinRound(3, None, "replicate", None, True))]
    driver = Driver().to_confirming()
    assert driver.answer(Committed(3, True)) == [End(key=(1, 7), published=True)]
    assert driver.feed(Broken(KeyboardInterrupt())) == []


def test_an_update_withdraws_its_old_copy_only_when_the_plan_stands() -> None:
    driver = updating()
    assert driver.feed(Begin()) == [Ask(1, JoinRound(3, None, "update", (1, 6), True))]
    assert driver.promise() == [Plan(True)]
    assert driver.feed(Planned()) == [Withdraw()]
    assert not driver.state.touched
    assert driver.feed(Withdrawn()) == [Tell(Filling(3)), Read()], "the server has no copy any more"
    assert driver.state.touched


def test_memory_of_which_the_server_may_have_a_copy_is_filled_when_it_knows() -> None:
    driver = holding()
    assert driver.feed(Begin()) == [Ask(1, JoinRound(3, None, "update", (1, 6), True))]
    assert driver.promise() == [Plan(True)]
    assert driver.feed(Planned()) == [Ask(2, Filling(3))]
    assert not driver.state.touched
    assert driver.answer(Ok()) == [Read()]
    assert driver.state.touched


@pytest.mark.parametrize("mode", ["stage", "install"])
def test_only_registered_memory_is_filled_without_the_servers_word(mode: Mode) -> None:
    have = (1, 7) if mode == "install" else None
    driver = Driver(RoundState(3, None, mode, have, True, 100.0, False))
    driver.feed(Begin())
    driver.answer(Promise(3, 1, 7, () if mode == "install" else (source(),)))
    assert driver.feed(Planned()) == [Ask(2, Filling(3))]


def test_nothing_newer_ends_an_update_without_touching_anything() -> None:
    driver = updating()
    driver.feed(Begin())
    assert driver.answer(NothingNewer(3, 1, 6)) == [End(key=(1, 6), held=True)]


def test_another_layout_is_refused_before_the_old_copy_is_withdrawn() -> None:
    driver = updating()
    driver.feed(Begin())
    driver.promise()
    error = LayoutMismatch("w differs", ("w",))
    told, end = driver.feed(PlanFailed(error))
    assert told == Tell(LeaveRound(3, "layout_mismatch", "w differs"))
    assert end == End(error=error)


def test_a_refused_join_is_the_servers_error() -> None:
    driver = Driver()
    driver.feed(Begin())
    end = ended(driver.answer(Failure("version_unavailable", "nobody holds 9")))
    assert isinstance(end.error, VersionUnavailable)
    assert not end.dirty


@pytest.mark.parametrize("when", ["planning", "withdrawing", "entering"])
def test_a_source_lost_before_the_read_is_replaced_first(when: str) -> None:
    driver = holding() if when == "entering" else updating()
    driver.feed(Begin())
    driver.promise()
    lost = Pushed(LeaseLost(3, "l1", "its worker is gone"))
    if when == "planning":
        assert driver.feed(lost) == []
        effects = driver.feed(Planned())
    elif when == "withdrawing":
        driver.feed(Planned())
        assert driver.feed(lost) == []
        effects = driver.feed(Withdrawn())
    else:
        driver.feed(Planned())
        assert driver.feed(lost) == []
        effects = driver.answer(Ok())
    assert only(effects, Ask).message == Relocate(3, (LeaseFailure("l1", "lost"),))
    assert driver.promise(source("l2", "b")) == [Plan(True)]


def test_a_source_that_cannot_be_described_is_replaced() -> None:
    driver = Driver()
    driver.feed(Begin())
    driver.promise()
    ask = only(driver.feed(PlanFailed(StateError("no blob"), "l1")), Ask)
    assert ask.message == Relocate(3, (LeaseFailure("l1", "unreachable", "no blob"),))


def test_what_exactly_failed_goes_to_the_server_within_its_bound() -> None:
    driver = Driver().to_reading()
    failed = ReadEnded(replace(outcome(ReadEnd.SOURCE_FAILED, "l1", "lost"), detail="x" * 10_000))
    asked = only(driver.feed(failed), Ask).message
    assert asked == Relocate(3, (LeaseFailure("l1", "lost", "x" * MOST_DETAIL),))
    assert decode_request(split(encode(1, asked))) == asked


def test_a_lost_lease_stops_its_source_and_the_read_goes_on_elsewhere() -> None:
    driver = Driver().to_reading()
    assert driver.feed(Pushed(LeaseLost(3, "l1", "gone"))) == [Abandon("l1", "gone")]
    failed = ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "lost", done=50))
    assert only(driver.feed(failed), Ask).message == Relocate(3, (LeaseFailure("l1", "lost"),))
    assert driver.promise(source("l2", "b")) == [Plan(True)]
    assert driver.feed(Planned()) == [Read()], "the memory is being filled already"


def test_a_source_that_the_server_calls_slow_is_left_for_another_and_reported_so() -> None:
    driver = Driver().to_reading()
    assert driver.feed(Pushed(SourceSlow(3, "someone else's", "1 byte/s"))) == []
    assert driver.feed(Pushed(SourceSlow(3, "l1", "1 byte/s"))) == [Abandon("l1", "1 byte/s", "slow")]
    failed = ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "slow"))
    assert only(driver.feed(failed), Ask).message == Relocate(3, (LeaseFailure("l1", "slow"),))
    assert driver.promise(source("l2", "b")) == [Plan(True)], "what is verified counts"


def test_a_source_that_gave_wrong_bytes_is_named_at_the_end() -> None:
    driver = Driver()
    driver.feed(Begin())
    driver.promise(source("l1", "a"), source("l2", "b"))
    driver.feed(Planned())
    driver.feed(ReadEnded(ReadOutcome(ReadEnd.VERIFIED, np.zeros(0, np.bool_), 100, corrupt=("l2",))))
    assert only(driver.feed(Settled(b"digest")), Ask).message == Done(3, b"digest", ("l2",))


def test_a_slow_source_that_has_given_everything_is_not_left() -> None:
    driver = Driver().to_confirming()
    assert driver.feed(Pushed(SourceSlow(3, "l1", "1 byte/s"))) == []


def test_pushes_of_other_rounds_and_leases_mean_nothing() -> None:
    driver = Driver().to_reading()
    for message in (
        LeaseLost(3, "other", "gone"),
        SourceProgress("other", 5, False),
        RoundAborted(2, "state_error", "old"),
    ):
        assert driver.feed(Pushed(message)) == []


def test_progress_of_a_source_is_passed_on_or_kept_until_the_read_starts() -> None:
    driver = Driver()
    driver.feed(Begin())
    driver.promise(source(whole=False, prefix=1))
    assert driver.feed(Pushed(SourceProgress("l1", 3, False))) == []
    assert driver.state.prefixes == {"l1": 3}
    driver.feed(Planned())
    assert driver.feed(Pushed(SourceProgress("l1", 4, True))) == [Advance("l1", 4, True)]
    assert driver.state.whole == {"l1"}


def test_a_lease_lost_after_the_read_is_left_to_the_question_done() -> None:
    driver = Driver().to_confirming()
    assert driver.feed(Pushed(LeaseLost(3, "l1", "gone"))) == []
    assert driver.answer(Discard(3, (source("l2", "b"),))) == [Plan(False)]
    assert driver.feed(Planned()) == [Read()]


def test_an_aborted_round_stops_the_read_before_it_ends() -> None:
    driver = Driver().to_reading()
    assert driver.feed(Pushed(RoundAborted(3, "state_error", "shard 1 is gone"))) == [Stop()]
    end = ended(driver.feed(CANCELLED))
    assert "shard 1" in str(end.error)
    assert end.dirty


def test_the_deadline_stops_the_read_before_it_ends() -> None:
    driver = Driver().to_reading()
    driver.now = 100.0
    told, stop = driver.feed(Tick())
    assert isinstance(told, Tell)
    assert isinstance(told.message, LeaveRound)
    assert told.message.code == "deadline_exceeded"
    assert stop == Stop()
    assert driver.feed(Tick()) == []
    end = ended(driver.feed(VERIFIED))
    assert isinstance(end.error, DeadlineExceeded)
    assert end.dirty


def test_a_read_that_does_not_stop_makes_the_memory_unquiet() -> None:
    driver = Driver().to_reading()
    driver.now = 100.0
    driver.feed(Tick())
    driver.now += moves.STOP_GRACE_S
    end = ended(driver.feed(Tick()))
    assert isinstance(end.error, TransportError)
    assert end.unquiet


def test_a_commit_that_crosses_the_deadline_is_believed() -> None:
    driver = Driver().to_confirming()
    driver.now = 100.0
    assert isinstance(only(driver.feed(Tick()), Tell).message, LeaveRound)
    assert driver.answer(Committed(3, True)) == [End(key=(1, 7), published=True)]


@pytest.mark.parametrize("reply", [Failure("deadline_exceeded", "left"), None])
def test_a_round_left_while_confirming_is_certain_only_with_the_servers_word(reply: Reply | None) -> None:
    driver = Driver().to_confirming()
    driver.now = 100.0
    driver.feed(Tick())
    if reply is None:
        driver.now += moves.LEAVE_GRACE_S
        end = ended(driver.feed(Tick()))
    else:
        end = ended(driver.answer(reply))
    assert isinstance(end.error, DeadlineExceeded)
    assert end.dirty
    assert end.uncertain == (reply is None)


def test_the_callers_own_error_comes_back_after_a_clean_stop() -> None:
    driver = Driver().to_reading()
    error = ZeroDivisionError("in progress()")
    told, stop = driver.feed(Broken(error))
    assert told == Tell(LeaveRound(3, "error", "in progress()"))
    assert stop == Stop()
    assert ended(driver.feed(CANCELLED)).error is error


def test_changes_of_source_without_progress_are_bounded() -> None:
    driver = Driver().to_reading()
    failed = ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "corrupt"))
    for _ in range(moves.MAX_FRUITLESS):
        assert isinstance(only(driver.feed(failed), Ask).message, Relocate)
        driver.promise()
        driver.feed(Planned())
    end = ended(driver.feed(failed))
    assert isinstance(end.error, CorruptTransfer)
    assert end.dirty


def test_progress_refills_the_budget_of_changes_but_not_for_ever() -> None:
    driver, changes = Driver(RoundState(3, None, "replicate", None, True, None, False)).to_reading(), 0
    while changes <= moves.MAX_RELOCATIONS:
        changes += 1
        effects = driver.feed(ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "lost", done=changes)))
        if isinstance(effects[-1], End):
            break
        driver.promise()
        driver.feed(Planned())
    assert changes == moves.MAX_RELOCATIONS + 1


def test_discards_are_bounded() -> None:
    driver = Driver().to_confirming()
    for _ in range(machine.MAX_DISCARDS):
        driver.answer(Discard(3, (source(),)))
        driver.feed(Planned())
        driver.feed(VERIFIED)
        driver.feed(Settled(b"digest"))
    driver.answer(Discard(3, (source(),)))
    end = ended(driver.answer(Failure("version_unavailable", "left")))
    assert isinstance(end.error, VersionUnavailable)


def test_another_version_than_promised_is_refused() -> None:
    driver = Driver().to_reading()
    driver.feed(ReadEnded(outcome(ReadEnd.SOURCE_FAILED, "l1", "lost")))
    driver.promise(number=8)
    end = ended(driver.answer(Failure("state_error", "left")))
    assert isinstance(end.error, StateError)
    assert end.dirty


@pytest.mark.parametrize("told_in", ["planning", "withdrawing", "entering", "reading"])
def test_a_source_that_does_not_begin_is_left_in_every_phase(told_in: str) -> None:
    driver = holding() if told_in == "entering" else updating()
    driver.feed(Begin())
    driver.promise(source(whole=False, prefix=0))
    told = Pushed(SourceSlow(3, "l1", "it has not begun"))
    steps = {"planning": Planned(), "withdrawing": Withdrawn()}
    if told_in == "entering":
        del steps["withdrawing"]
    for phase, event in steps.items():
        if told_in == phase:
            assert driver.feed(told) == []
        effects = driver.feed(event)
        if told_in == phase:
            assert only(effects, Ask).message == Relocate(3, (LeaseFailure("l1", "slow"),))
            return
    if told_in == "entering":
        assert driver.feed(told) == []
        assert only(driver.answer(Ok()), Ask).message == Relocate(3, (LeaseFailure("l1", "slow"),))
        return
    assert driver.feed(told) == [Abandon("l1", "it has not begun", "slow")]


def test_a_deadline_is_told_in_the_words_of_the_server_which_knows_who_holds_the_version() -> None:
    driver = Driver()
    driver.feed(Begin())
    driver.now = 101.0
    assert only(driver.feed(Tick()), Tell).message.code == DeadlineExceeded.code
    end = ended(driver.answer(Failure(DeadlineExceeded.code, "the deadline passed; silent at the moment: trainer")))
    assert isinstance(end.error, DeadlineExceeded)
    assert "silent at the moment: trainer" in str(end.error)


def test_a_deadline_stays_one_whatever_else_the_round_ended_with() -> None:
    driver = Driver()
    driver.feed(Begin())
    driver.now = 101.0
    driver.feed(Tick())
    end = ended(driver.answer(Failure(VersionUnavailable.code, "gone")))
    assert isinstance(end.error, DeadlineExceeded)
