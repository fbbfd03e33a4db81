"""Which machines cannot reach each other: learnt from readers that tried in vain, bounded, and forgotten again; pure.

A pair is a reader's place and a source's: machine and NIC group, or the worker alone where that is not known or both
are on one machine. One worker that cannot reach a machine spares its neighbours the attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tensorhub_core.ids import WorkerId

FORGET_S = 600.0
"""A pair is tried again after that: somebody may have mended the network."""
MOST_PAIRS = 4096
"""So many are remembered, those learnt last."""


class Placed(Protocol):
    """A worker, as far as it matters here."""

    @property
    def id(self) -> WorkerId:
        """Return its id."""

    @property
    def host(self) -> str:
        """Return its machine; empty is unknown."""

    @property
    def rail(self) -> str:
        """Return its NIC group; empty is unknown."""


@dataclass(slots=True)
class Reachability:
    """The pairs, in the order in which they were learnt.

    `pairs` holds, by place of the reader and of the source, which two workers have shown it and when it is forgotten.
    Either of them may have been the trouble itself: when one of them is gone, so is the pair.
    """

    pairs: dict[tuple[tuple[str, str], tuple[str, str]], tuple[WorkerId, WorkerId, float]] = field(default_factory=dict)
    readers: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many pairs there are of each reader's place."""

    def learn(self, reader: Placed, source: Placed, now: float) -> None:
        """Take note that a reader has tried a source in vain."""
        pair = pair_of(reader, source)
        self._drop(pair)
        self.pairs[pair] = (reader.id, source.id, now + FORGET_S)
        self.readers[pair[0]] = self.readers.get(pair[0], 0) + 1
        while len(self.pairs) > MOST_PAIRS or next(iter(self.pairs.values()))[2] <= now:
            self._drop(next(iter(self.pairs)))

    def reached(self, reader: Placed, source: Placed) -> None:
        """Take note that a reader has read from a source."""
        if self.pairs:
            self._drop(pair_of(reader, source))

    def forget(self, worker: WorkerId) -> None:
        """Forget what a worker has shown that is no more."""
        for pair in [pair for pair, shown in self.pairs.items() if worker in shown[:2]]:
            self._drop(pair)

    def any_from(self, reader: Placed) -> bool:
        """Tell whether there is anything that a reader may be unable to reach."""
        return (reader.host, reader.rail) in self.readers or ("", reader.id) in self.readers

    def apart(self, reader: Placed, source: Placed, now: float) -> bool:
        """Tell whether a reader need not try a source if it has another one."""
        shown = self.pairs.get(pair_of(reader, source))
        return shown is not None and now < shown[2]

    def _drop(self, pair: tuple[tuple[str, str], tuple[str, str]]) -> None:
        if self.pairs.pop(pair, None) is None:
            return
        self.readers[pair[0]] -= 1
        if not self.readers[pair[0]]:
            del self.readers[pair[0]]


def pair_of(reader: Placed, source: Placed) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return the places between which nothing gets through if this reader does not reach this source."""
    if reader.host and source.host and reader.host != source.host:
        return (reader.host, reader.rail), (source.host, source.rail)
    return ("", reader.id), ("", source.id)
