"""What the server said together with its promises: blobs, and which checksums it has; of one round."""

from __future__ import annotations

from tensorhub_core.client.access import SourceBook
from tensorhub_core.state.messages import Discard, Promise, Reply


class Promised:
    """The promises that a round has heard; on its thread."""

    def __init__(self, book: SourceBook) -> None:
        self._book = book
        self._life = 0
        self._sums: frozenset[bytes] = frozenset()

    def hear(self, reply: Reply, life: int) -> None:
        """Take in what an answer brings, in this life of the session."""
        if isinstance(reply, Promise | Discard):
            self._book.learn(reply.blobs)
            self._life, self._sums = life, frozenset(source.sums for source in reply.sources)

    def names(self, sums: bytes, life: int) -> bool:
        """Tell whether the server named these checksums itself in this life of the session, as those of a source.

        Then it has them, and keeps them for the copy that is read by them.
        """
        return life == self._life and sums in self._sums
