"""The follow loop: what it waits for, and that it backs off instead of spinning."""

from __future__ import annotations

from typing import Any

from tensorhub_core.engine.follow import Follower, Sleep, SwapTo, WaitNewer
from tensorhub_core.engine.steps import EngineStatus, SwapOutcome


class Loop:
    def __init__(self, status: EngineStatus) -> None:
        self.status = status
        self.steps = Follower(first_s=1.0, longest_s=8.0).steps(lambda: self.status)
        self.step: Any = next(self.steps)

    def answer(self, value: Any) -> Any:
        self.step = self.steps.send(value)
        return self.step

    def fail(self) -> Any:
        self.step = self.steps.throw(RuntimeError("connection lost"))
        return self.step


def serving(version: int, epoch: int = 0) -> EngineStatus:
    return EngineStatus("policy", "engine", version=version, epoch=epoch)


def test_waits_for_newer_than_what_is_served_and_swaps() -> None:
    loop = Loop(serving(3))
    assert loop.step == WaitNewer((0, 3))
    assert loop.answer((0, 4)) == SwapTo()
    loop.status = serving(4)
    assert loop.answer(SwapOutcome(4, True)) == WaitNewer((0, 4))
    assert loop.answer(None) == WaitNewer((0, 4)), "nothing came: look at the status and wait again"


def test_a_paused_engine_takes_any_version() -> None:
    assert Loop(EngineStatus("policy", "engine", state="paused", version=None)).step == WaitNewer(None)


def test_failures_back_off_up_to_the_bound() -> None:
    loop = Loop(serving(3))
    pauses = []
    for _ in range(6):
        assert isinstance(loop.step, WaitNewer)
        loop.answer((0, 4))
        step = loop.answer(SwapOutcome(3, False, "version_unavailable", "gone"))
        assert isinstance(step, Sleep)
        pauses.append(step.seconds)
        loop.answer(None)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert loop.step == WaitNewer((0, 3)), "a transient failure is tried again with the same version"
    loop.answer((0, 4))
    loop.status = serving(4)
    loop.answer(SwapOutcome(4, True))
    loop.answer((0, 5))
    assert loop.answer(SwapOutcome(4, False, "error", "x")) == Sleep(1.0), "success resets the back-off"


def test_a_version_that_cannot_fit_is_not_tried_again() -> None:
    loop = Loop(serving(3))
    loop.answer((0, 4))
    loop.answer(SwapOutcome(3, False, "layout_mismatch", "other model"))
    assert loop.answer(None) == WaitNewer((0, 4))


def test_an_announcement_without_a_change_does_not_spin() -> None:
    loop = Loop(serving(3))
    loop.answer((0, 4))
    assert loop.answer(SwapOutcome(3, False)) == Sleep(1.0)


def test_a_failing_wait_backs_off() -> None:
    loop = Loop(serving(3))
    assert loop.fail() == Sleep(1.0)
    assert loop.answer(None) == WaitNewer((0, 3))
