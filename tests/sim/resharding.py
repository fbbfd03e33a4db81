"""Readers of a layout of their own in a random world: they announce checksums, and follow each other by those."""

from __future__ import annotations

import random

from tensorhub_core.state.messages import Announce, Done, PutBlob, Source, SourceProgress
from tests.sim.hub import digest
from tests.sim.lives import SEGMENTS, Life, sums


class Resharding:
    """What readers do about checksums; where they have the trainers' layout (not `enabled`) there is nothing to do."""

    def __init__(self, enabled: bool, chance: random.Random) -> None:
        self.enabled, self.chance = enabled, chance
        self.followed = 0
        """How often a source without a manifest was promised."""

    def layout(self, life: Life) -> bytes:
        """Return the blob of a process's layout."""
        whose = b"reader's " if self._reshards(life) else b""
        return whose + b"layout %d" % life.shard

    def sums(self, life: Life, number: int) -> bytes:
        """Return the blob of the checksums of a version in a process's layout."""
        if not self._reshards(life):
            return sums(number, life.shard)
        return b"".join(digest(b"%d %d %d" % (number, life.shard, segment))[:8] for segment in range(SEGMENTS))

    def able(self, life: Life) -> list[Source]:
        """Return the sources that may give the next segment."""
        found = [source for source in life.sources if life.verified < life.readable[source.lease]]
        return [source for source in found if source.shard == life.shard] if self.enabled else found

    def announce(self, life: Life) -> Announce:
        """Return what a reader says of its progress: all checksums, or those of the last segment only."""
        packed = b""
        if self._derives(life, life.sources):
            assert life.promised is not None
            first = self.chance.choice((0, life.verified - 1))
            packed = self.sums(life, life.promised[1])[8 * first : 8 * life.verified]
        return Announce(life.round, life.verified, 100 * life.verified, packed)

    def done(self, life: Life) -> None:
        """Say that all is verified."""
        assert life.promised is not None
        found = self.sums(life, life.promised[1])
        life.ask(PutBlob(digest(found), found))
        life.ask(Done(life.round, digest(found)))

    def promised(self, life: Life, sources: tuple[Source, ...]) -> None:
        """Keep of what was verified what counts at the new sources, and note which checksums are known."""
        if not self.enabled:
            return
        assert life.promised is not None
        number = life.promised[1]
        content = tuple((source.layout, source.sums) for source in sources)
        life.known = {source.lease: len(source.known) // 8 for source in sources if source.partial}
        self.followed += len(life.known)
        for source in sources:
            assert self.sums(life, number).startswith(source.known), "the checksums of another version"
            assert not source.partial or source.prefix == len(source.known) // 8, "read without checksums"
        if life.known:
            life.verified = min(life.verified, *life.known.values())
        elif content != life.content and self._derives(life, sources):
            life.verified = 0
        life.content = content

    def heard(self, life: Life, message: SourceProgress) -> int:
        """Return how far a source may be read."""
        prefix = SEGMENTS if message.whole else message.prefix
        if message.lease not in life.known:
            assert not message.sums, "checksums for who has a manifest"
            return prefix
        assert life.promised is not None
        packed = self.sums(life, life.promised[1])[8 * message.first :]
        assert packed.startswith(message.sums), "the checksums of another version"
        assert message.first <= life.known[message.lease], "a gap between checksums"
        life.known[message.lease] = max(life.known[message.lease], message.first + len(message.sums) // 8)
        assert prefix <= life.known[message.lease], "read without checksums"
        return prefix

    def _reshards(self, life: Life) -> bool:
        return self.enabled and not life.is_trainer

    def _derives(self, life: Life, sources: tuple[Source, ...]) -> bool:
        return self.enabled and any(source.layout != digest(self.layout(life)) for source in sources)
