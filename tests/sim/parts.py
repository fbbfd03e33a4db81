"""Questions for checksums of cuts in a random world: asked while reading, and answered by who holds them, or not."""

from __future__ import annotations

import random

from tensorhub_core.state.bounds import PACKED_CUT_BYTES
from tensorhub_core.state.messages import AskSums, Failure, GiveSums, Reply, Request, SumsGiven, SumsWanted
from tests.sim.hub import digest
from tests.sim.lives import Life


class Parts:
    """Lets readers ask and holders answer; what is asked is never the same twice."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rate = 0.2
        """How often a reader asks, each time that it may; 0 = never."""
        self.asked: dict[bytes, bytes] = {}
        """Where the cuts lie, by the cuts."""
        self.given = 0

    def ask(self, life: Life) -> None:
        """Ask a source now and then."""
        if not self.rate or life.phase != "reading" or not life.sources or self.chance.random() > self.rate:
            return
        source = self.chance.choice(life.sources)
        cuts = len(self.asked).to_bytes(PACKED_CUT_BYTES, "little")
        self.asked[cuts] = source.placement
        life.ask(AskSums(life.round, source.lease, cuts))

    def hear(self, life: Life, asked: Request | None, message: Reply) -> bool:
        """Take a message in that concerns such questions; tell whether it did."""
        if isinstance(message, SumsWanted):
            places = (life.placement, life.staging, *life.offloads)
            assert message.placement == self.asked[message.cuts], "asked for what lies elsewhere"
            if message.placement in places and life.alive and self.chance.random() < 0.9:
                self._answer(life, message)
            return True
        if not isinstance(asked, AskSums):
            return False
        if isinstance(message, SumsGiven) and not message.refusal:
            self.given += 1
            assert message.sums == _sum_of(self.asked[asked.cuts], asked.cuts), "the answer to something else"
        else:
            assert isinstance(message, SumsGiven | Failure)
        return True

    def _answer(self, life: Life, message: SumsWanted) -> None:
        right = _sum_of(message.placement, message.cuts)
        if self.chance.random() < 0.1:
            return life.ask(GiveSums(message.ticket, b"", "wait"))
        if self.chance.random() < 0.1:
            life.ask(GiveSums(message.ticket, right + bytes(8)))
        for _ in range(self.chance.choice((1, 1, 2))):
            life.ask(GiveSums(message.ticket, right))


def _sum_of(placement: bytes, cuts: bytes) -> bytes:
    return digest(placement + cuts)[:8]
