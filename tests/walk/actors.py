"""One process of the walk as it sees itself: its memory, what it believes, what it waits for; and what it has heard."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from tensorhub_core.ids import SessionId

SEGMENTS = 2
GARBAGE = 0
Reading = tuple[int, int, int, int]
"""Where a lease lets its reader read: life of the holder, which of its memories, prefix, life of the server."""
REGISTERED, STAGING, OFFLOAD = range(3)
"""The memories of a process. Their placements begin with these letters:"""
LETTERS = b"PSO"


Action = tuple[str, int, str]
"""What happens, in which place, and more about it."""


class Violation(Exception):
    """A law is broken."""


@dataclass(slots=True)
class Actor:
    """A trainer's rank or a reader's worker. `cells` holds the version that each segment of its memory really is of.

    `phase`: idle, joining, promised, reading, relocating, done, rejoining or over. `held`: the version that it offers;
    `draining`: it has asked to take it back. `touched`: its memory is no version since this round. `asked_done`: the
    server may have committed what it read.
    """

    place: int
    replica: str
    shard: int
    is_source: bool
    life: int
    session: SessionId
    cells: list[int] = field(default_factory=lambda: [GARBAGE] * SEGMENTS)
    staged_cells: list[int] = field(default_factory=lambda: [GARBAGE] * SEGMENTS)
    alive: bool = True
    phase: str = "idle"
    mode: str = "replicate"
    want: int | None = None
    held: int = 0
    draining: bool = False
    staged: int = 0
    unstaging: bool = False
    offloads: dict[int, list[int]] = field(default_factory=dict)
    """Its offload copies, by version."""
    offload_asked: str = ""
    """The copy that it should offload."""
    last: int = 0
    high: int = 0
    round: int = 0
    promised: int = 0
    verified: int = 0
    touched: bool = False
    running: bool = False
    """Its read has begun, and goes on whatever happens to its connection."""
    unheard: bool = False
    """It fills its memory, and the server has yet to hear of it."""
    asked_done: bool = False
    committed: bool = False
    """It has committed, but has not heard of it."""
    aborted: bool = False
    """Its round was aborted, but it has not heard of it."""
    greet: bool = False
    """It was told to say hello again."""
    ended: tuple[int, int] | None = None
    """Its last round and the version that it ended with, 0 for none."""
    in_grace: bool = False
    """It joined while the server listened."""
    seeds: bool = False
    """It is a seed agent of its zone."""
    came_back: bool = False
    """It has come back to its round; if that breaks, it says hello again to hear which is its next."""
    next_request: int = 1
    derives: bool = False
    """It reads another layout: its own checksums are what it announces."""
    sources: dict[str, Reading] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Leases that were lost, which it has not heard of."""
    open: dict[int, str] = field(default_factory=dict)
    """What it waits for, by the number of its request."""
    resend: set[str] = field(default_factory=set)
    """What of that it has to ask again after another hello."""
    forgotten: int = 0
    """Requests up to this one are of no interest any more, but for those that are open."""

    def clone(self) -> Actor:
        """Return an independent copy."""
        new = Actor(*_values(self))
        new.cells, new.staged_cells = self.cells.copy(), self.staged_cells.copy()
        new.sources, new.lost, new.open = self.sources.copy(), self.lost.copy(), self.open.copy()
        new.resend = self.resend.copy()
        new.offloads = {code: cells.copy() for code, cells in self.offloads.items()}
        return new

    @property
    def name(self) -> str:
        """Return how traces name it."""
        return f"{self.replica}/{self.shard}"

    @property
    def filled(self) -> list[int]:
        """Return the memory that its round fills."""
        return self.staged_cells if self.mode == "stage" else self.cells

    @property
    def in_round(self) -> bool:
        """Tell whether it is in a round."""
        return self.phase in ("joining", "promised", "reading", "relocating", "done", "rejoining")

    def memory(self, which: int, code: int) -> list[int]:
        """Return one of its memories, that which keeps a version if there are several."""
        if which == OFFLOAD:
            return self.offloads.get(code, [GARBAGE] * SEGMENTS)
        return self.staged_cells if which == STAGING else self.cells


_values = attrgetter(*Actor.__slots__)
