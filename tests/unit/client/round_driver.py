"""Drive the client's round machine by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tensorhub_core.client.machine import step
from tensorhub_core.client.reading import ReadEnd, ReadOutcome
from tensorhub_core.client.rounds import (
    Answered,
    Ask,
    Begin,
    Effect,
    End,
    Event,
    Plan,
    Planned,
    Read,
    ReadEnded,
    RoundState,
    Settle,
    Settled,
    Tell,
    Withdraw,
    Withdrawn,
)
from tensorhub_core.state.messages import (
    Done,
    Filling,
    Ok,
    Promise,
    Reply,
    Source,
)

E = TypeVar("E", bound=Effect)


def source(lease: str = "l1", place: str = "a", whole: bool = True, prefix: int = 4) -> Source:
    return Source(lease, "w", "r-" + place, 0, 1, b"layout", place.encode(), b"sums", whole, prefix)


def outcome(end: ReadEnd, lease: str = "", kind: str = "", done: int = 0) -> ReadOutcome:
    return ReadOutcome(end, np.zeros(0, np.bool_), done, lease, kind)


VERIFIED = ReadEnded(outcome(ReadEnd.VERIFIED, done=100))
CANCELLED = ReadEnded(outcome(ReadEnd.CANCELLED))


@dataclass
class Driver:
    """Feed events and keep the effects; answers go to the newest request."""

    state: RoundState = field(default_factory=lambda: RoundState(3, None, "replicate", None, True, 100.0, False))
    now: float = 0.0

    def feed(self, event: Event) -> list[Effect]:
        _, effects = step(self.state, event, self.now)
        return effects

    def answer(self, reply: Reply) -> list[Effect]:
        return self.feed(Answered(self.state.asked, reply))

    def promise(self, *sources: Source, number: int = 7) -> list[Effect]:
        return self.answer(Promise(self.state.number, 1, number, sources or (source(),)))

    def to_reading(self) -> Driver:
        self.feed(Begin())
        assert self.promise() == [Plan(True)]
        effects = self.feed(Planned())
        if self.state.published:
            assert effects == [Withdraw()]
            effects = self.feed(Withdrawn())
        if self.state.clear:
            assert effects == [Tell(Filling(self.state.number)), Read()]
            return self
        assert effects == [Ask(self.state.asked, Filling(self.state.number))]
        assert self.answer(Ok()) == [Read()]
        return self

    def to_confirming(self) -> Driver:
        self.to_reading()
        assert self.feed(VERIFIED) == [Settle()]
        assert self.feed(Settled(b"digest")) == [Ask(self.state.asked, Done(self.state.number, b"digest"))]
        return self


def only(effects: list[Effect], kind: type[E]) -> E:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def ended(effects: list[Effect]) -> End:
    assert isinstance(effects[-1], End), effects
    return effects[-1]


def updating(**more: Any) -> Driver:
    return Driver(RoundState(3, None, "update", (1, 6), True, 100.0, True, **more))


def holding() -> Driver:
    """Return a round in memory that holds a version which is not offered: the server may know of it."""
    return Driver(RoundState(3, None, "update", (1, 6), True, 100.0, False))
