"""Kill and stop every role at every named point of a version's life, on NIXL, and judge the whole history.

The points are the messages of the protocol: right before and after a process sends one, when it hears one, and for the
hub before and after it has carried one out. CI strikes every point once, `EVERY_LIFE=1` in every way.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from tests.processes.lives.cast import HUB, LONG_S, SHORT_S, Cast, Place
from tests.processes.lives.member import CALL_S
from tests.processes.lives.validators import judge
from tests.transport.lab import needs_nixl

pytestmark = [needs_nixl, pytest.mark.timeout(180)]
SETTLE_S = 60.0
READER: Place = ("reader-1", 1)
TRAINER: Place = ("trainer-0", 1)
AROUND = ("before", "after")
POINTS = (
    *itertools.product((READER,), AROUND, ("JoinRound", "Unpublish", "Filling", "Announce", "Done")),
    *itertools.product((READER,), ("heard",), ("Promise", "Committed")),
    *itertools.product((TRAINER,), AROUND, ("Publish", "Unpublish")),
    (TRAINER, "heard", "Published"),
    *itertools.product((HUB,), AROUND, ("JoinRound", "Filling", "Announce", "Done", "Publish", "Unpublish")),
)
WAYS = ((signal.SIGKILL, 0.0), (signal.SIGSTOP, SHORT_S), (signal.SIGSTOP, LONG_S))


def strikes() -> Iterator[tuple[Place, str, str, signal.Signals, float]]:
    """Yield every point with one way to strike, or with all of them."""
    for number, (place, when, message) in enumerate(POINTS):
        ways = WAYS if os.environ.get("EVERY_LIFE") else (WAYS[number % len(WAYS)],)
        for how, pause_s in ways:
            yield place, when, message, how, pause_s


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """Start the processes once; whoever is struck is started again."""
    playing = Cast(tmp_path_factory.mktemp("lives"))
    try:
        playing.settle(SETTLE_S)
        yield playing
    finally:
        playing.close()


@pytest.mark.parametrize(("place", "when", "message", "how", "pause_s"), list(strikes()))
def test_after_a_strike_everybody_gets_the_next_version(
    cast: Cast, place: Place, when: str, message: str, how: signal.Signals, pause_s: float
) -> None:
    cast.strike(place, when, message, how, pause_s)
    cast.settle(SETTLE_S)


def test_the_history_of_all_lives_breaks_no_law(cast: Cast) -> None:
    history = cast.history()
    assert {line["kind"] for line in history} >= {"crash", "bytes", "late", "in", "out"}
    assert judge(history, CALL_S) == []
