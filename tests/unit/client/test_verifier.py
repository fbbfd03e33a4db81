"""Who checks what has landed: the thread that moves bytes while it has none to move, others what came before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from tensorhub_core.client.verifier import Checked, Checker, Landed, Verifier

WAIT_S = 10.0


class Recorder:
    """A checker that notes who called it; also what results are delivered to."""

    def __init__(self) -> None:
        self.checked: dict[int, str] = {}
        self.delivered: list[Checked] = []
        self.another = threading.Semaphore(0)

    def check(self, landed: Landed) -> Checked:
        """Note the calling thread."""
        self.checked[landed.begin] = threading.current_thread().name
        if landed.source:
            raise ValueError("this one cannot be checked")
        return Checked(landed, np.ones(landed.end - landed.begin, np.bool_))

    def deliver(self, checked: Checked) -> None:
        """Keep a result."""
        self.delivered.append(checked)
        self.another.release()


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    made = Verifier(8, threads=1)
    yield made
    made.close(WAIT_S)


def submit(verifier: Verifier, recorder: Recorder, number: int, source: int = 0) -> None:
    landed = Landed(source, number, number + 1)
    verifier.submit(cast("Checker", recorder), landed, recorder.deliver)


def test_the_last_one_waits_for_the_caller_and_those_before_go_to_the_threads(verifier: Verifier) -> None:
    recorder, me = Recorder(), threading.current_thread().name
    for number in range(4):
        submit(verifier, recorder, number)
    for _ in range(3):
        assert recorder.another.acquire(timeout=WAIT_S)
    assert set(recorder.checked) == {0, 1, 2}
    assert me not in recorder.checked.values()
    assert verifier.help()
    assert recorder.checked[3] == me
    assert sorted(each.landed.begin for each in recorder.delivered) == [0, 1, 2, 3]
    assert not verifier.help()


def test_what_cannot_be_checked_is_delivered_with_its_error(verifier: Verifier) -> None:
    recorder = Recorder()
    submit(verifier, recorder, 0, source=1)
    assert verifier.help()
    (found,) = recorder.delivered
    assert isinstance(found.error, ValueError)
    assert not found.right.any()


def test_the_caller_helps_with_what_waits_for_the_threads() -> None:
    recorder, busy, go = Recorder(), threading.Event(), threading.Event()
    verifier = Verifier(8, threads=1)

    class Slow(Recorder):
        def check(self, landed: Landed) -> Checked:
            busy.set()
            assert go.wait(WAIT_S)
            return super().check(landed)

    slow = Slow()
    try:
        submit(verifier, slow, 0)
        submit(verifier, recorder, 1)
        assert busy.wait(WAIT_S)
        submit(verifier, recorder, 2)
        assert verifier.help()
        assert verifier.help()
        assert set(recorder.checked) == {1, 2}
        assert not verifier.help()
    finally:
        go.set()
        verifier.close(WAIT_S)
    assert set(slow.checked) == {0}
