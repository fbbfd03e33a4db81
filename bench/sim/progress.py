"""How far a worker's unfinished copy is: what is verified of it, what followers see of it, what the hub is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.assumptions import Assumptions
from bench.sim.events import Events, Timer
from bench.sim.following import NOTHING, Follow, Word
from bench.sim.reads import Read
from bench.sim.shapes import Shape

from tensorhub_core.client.announcing import SEEN_S, Announcing
from tensorhub_core.state.messages import Ok, Reply

Announce = Callable[[tuple[int, int], Callable[[Reply], None]], None]
"""Announce (segments, bytes) and call with the answer."""

_UP_S = 1e6
"""The machine has been up for so long when the simulated time begins."""


@dataclass(eq=False)
class Progress:
    """The progress of one worker. `shown` is the digest of the checksums of what it fills, empty if it shows nothing.

    It shows all of a copy until that is withdrawn.
    """

    events: Events
    assumptions: Assumptions
    shape: Shape
    announce: Announce
    entered: Callable[[], bool]
    """The hub knows that the copy is filled."""
    shown: bytes = b""
    verified: int = 0
    announced: int = 0
    life: int = 0
    followers: list[Follow] = field(default_factory=list)
    """Those who read from this worker now."""
    announcing: Announcing = field(default_factory=Announcing)
    _read: Read | None = None
    _told_s: float = -math.inf
    _owed: int | None = None
    """The life of the session in which the answer to an announcement is waited for."""
    _timer: Timer | None = None
    _grid_s: float = 0.0

    def start(self) -> None:
        """Begin a round, which has nothing yet."""
        self.announcing, self.verified = Announcing(self.assumptions.announce_s.value), 0
        self._owed, self._told_s = None, -math.inf

    def begin(self, read: Read, content: bytes) -> None:
        """Show how far a read is; what is verified already counts."""
        self._read, self.shown, self._grid_s = read, content, self.events.now
        read.moved = self.moved
        self.moved()

    def end(self, whole: bool) -> None:
        """Take the end of the read: what is verified stays."""
        if self._read is not None:
            self.verify()
            self._read = None
        if whole:
            self.verified = self.shape.segments
        self.moved()

    def clear(self) -> None:
        """Show nothing any more."""
        self.shown = b""
        self.moved()

    def moved(self) -> None:
        """Tell who follows, and see when to announce."""
        if self.assumptions.looks.value and self.followers:
            self.events.at(self.events.now, self._tell)
        self.see_to_it()

    def _tell(self) -> None:
        for follow in list(self.followers):
            follow.source_moved()

    # --- verified ---------------------------------------------------------------------------------------------------

    def word(self, content: bytes) -> Word:
        """Return what a follower sees who looks for the progress of a version."""
        return self._state() if content == self.shown else NOTHING

    def verify(self) -> int:
        """Return how many segments are verified."""
        whole = int(self._state().verified_bytes / self.shape.segment_bytes + 1e-6)
        self.verified = max(self.verified, min(whole, self.shape.segments))
        return self.verified

    def _state(self) -> Word:
        known = float(min(self.shape.total_bytes, self.verified * self.shape.segment_bytes))
        read = self._read
        if read is None:
            return Word(known, known, 0.0)
        done, rate = read.count(), read.rate
        landed = done - self._flight_bytes(read, rate)
        return Word(max(known, landed), landed, rate)

    def _flight_bytes(self, read: Read, rate: float) -> float:
        """Return how much has come but is not verified; nothing of it where the reader waits for each piece."""
        return 0.0 if not rate or read.rides else self.assumptions.flight_bytes(rate)

    # --- announced --------------------------------------------------------------------------------------------------

    def see_to_it(self) -> None:
        """See to it that progress is announced in time, as `client/driver.py` does: it looks every few milliseconds."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        read = self._read
        if read is None or read.over:
            return
        a, now, told = self.assumptions, self.events.now, self.announcing.told[0]
        if self._owed == self.life:
            return  # the answer comes, or another life of the session
        least_s = max(a.announce_s.value, SEEN_S) if a.looks.value and told else a.announce_s.value
        due_s = max(self._told_s + least_s, now + self._more_in_s(told))
        if due_s < math.inf:
            polls = max(1, math.ceil((max(due_s, now) - self._grid_s) / a.poll_s.value - 1e-6))
            at_s = self._grid_s + polls * a.poll_s.value
            self._timer = self.events.at(at_s if at_s > now else at_s + a.poll_s.value, self._poll)

    def _more_in_s(self, told: int) -> float:
        """Return when more than so many segments are verified."""
        word, least = self._state(), (told + 1) * self.shape.segment_bytes
        if word.verified_bytes >= least:
            return 0.0
        return (least - word.landed_bytes) / word.rate if word.rate else math.inf

    def _poll(self) -> None:
        self._timer = None
        if self._read is None:
            return
        now, seen = self.events.now + _UP_S, bool(self.assumptions.looks.value)
        segments = self.verify()
        figures = (segments, min(self.shape.total_bytes, segments * self.shape.segment_bytes))
        if self.entered() and self.announcing.is_due(figures, self.life, now, seen=seen):
            answered = self.announcing.note(figures, self.life, now)
            life = self._owed = self.life

            def heard(reply: Reply) -> None:
                answered(reply)
                if self._owed == life:
                    self._owed = None
                    self.see_to_it()

            self._told_s = self.events.now
            self.announced += 1
            self.announce(figures, heard)
            if not self.assumptions.announces_one.value:
                heard(Ok())
        self.see_to_it()
