"""Every order of events that the round machine can meet keeps the rules, and a machine that breaks one is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub_core.client import machine, moves
from tensorhub_core.client.moves import Step
from tensorhub_core.client.rounds import End, Mode, Phase
from tensorhub_core.state.messages import Discard, Filling, LeaseLost, Ok, Promise, Reply
from tests.unit.client.machine_walk import walk


@pytest.fixture(autouse=True)
def small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the budgets, so that the walk ends."""
    for owner, name in ((moves, "MAX_FRUITLESS"), (machine, "MAX_DISCARDS"), (machine, "MAX_REJOINS")):
        monkeypatch.setattr(owner, name, 1)
    monkeypatch.setattr(moves, "MAX_RELOCATIONS", 2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mode", "had_copy", "fresh"),
    [
        ("update", True, False),
        ("replicate", False, False),
        ("replicate", False, True),
        ("stage", False, False),
        ("install", True, False),
        ("install", False, False),
    ],
)
def test_every_order_of_events_keeps_the_rules(mode: Mode, had_copy: bool, fresh: bool) -> None:
    states, ends = walk(mode, had_copy, fresh)
    assert states > (100 if mode == "install" else 5000)
    assert ("NoneType", False, False, False) in ends
    assert (("NoneType", False, True, False) in ends) == (mode != "replicate")
    for error in ("DeadlineExceeded", "KeyboardInterrupt", "StateError", "VersionUnavailable"):
        assert (error, False, False, False) in ends
        assert (error, True, False, False) in ends
    assert any(uncertain for *_, uncertain in ends)


def _reads_without_withdrawing(monkeypatch: pytest.MonkeyPatch) -> None:
    def proceed(s: Step) -> None:
        moves.read(s) if s.state.entered else s.ask(Filling(s.state.number), Phase.ENTERING)

    monkeypatch.setattr(machine, "proceed", proceed)


def _ends_while_bytes_may_land(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fail", lambda s, error: s.end(End(error=error, dirty=s.state.touched)))


def _reads_before_the_server_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "proceed", lambda s: moves.read(s))


def _never_waits_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    real = moves.proceed

    def proceed(s: Step) -> None:
        s.state.clear = True
        real(s)

    monkeypatch.setattr(machine, "proceed", proceed)


def _believes_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.answered

    def answered(s: Step, reply: Reply) -> None:
        if isinstance(reply, Ok | Discard):
            return s.end(End(key=(1, 7), published=True))
        real(s, reply)

    monkeypatch.setattr(machine, "answered", answered)


def _has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "tick", lambda s: None)


def _starts_a_second_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.pushed

    def pushed(s: Step, message: Reply) -> None:
        if isinstance(message, LeaseLost) and s.state.running:
            return moves.read(s)
        real(s, message)

    monkeypatch.setattr(machine, "pushed", pushed)


def _calls_touched_memory_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "refused", lambda s, error: s.end(End(error=error)))


@pytest.mark.parametrize(
    "mutant",
    [
        _reads_without_withdrawing,
        _ends_while_bytes_may_land,
        _reads_before_the_server_knows,
        _believes_every_answer,
        _has_no_deadline,
        _starts_a_second_read,
        _calls_touched_memory_clean,
    ],
)
def test_a_machine_that_breaks_a_rule_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        walk("update", True)


def test_a_machine_that_never_waits_for_the_server_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _never_waits_for_the_server(monkeypatch)
    with pytest.raises(AssertionError, match="unless it had no copy"):
        walk("replicate", False)


def test_a_machine_that_installs_whatever_it_is_told_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.promised

    def promised(s: Step, promise: Promise) -> None:
        s.state.have = (promise.epoch, promise.number)
        real(s, promise)

    monkeypatch.setattr(machine, "promised", promised)
    with pytest.raises(AssertionError, match="nothing else"):
        walk("install", True)
