"""One worker of a random world, as it sees itself: its memory, its mailboxes, what it believes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tensorhub_core.ids import SessionId
from tensorhub_core.state.messages import Reply, Request, Source, Unpublish, Unstage

SEGMENTS = 2
Cell = tuple[int, int] | None


@dataclass
class Life:
    """One process life: its memory, its mailboxes, and what it believes."""

    session: SessionId
    replica: str
    shard: int
    num_shards: int
    is_trainer: bool
    era: str = ""
    """Its replica, as long as that is there: one that comes back later begins at round 0."""
    cells: list[Cell] = field(default_factory=lambda: [None] * SEGMENTS)
    placement: bytes = b""
    staging: bytes = b""
    staged_cells: list[Cell] = field(default_factory=lambda: [None] * SEGMENTS)
    staged: int | None = None
    unstaging: bool = False
    offloads: dict[bytes, list[Cell]] = field(default_factory=dict)
    """What lies in offload memory, by the digest of its placement."""
    making: tuple[str, int] | None = None
    """The copy to be offloaded, and its version."""
    withdrawing: int | None = None
    mode: str = "replicate"
    outbox: deque[tuple[int, Request]] = field(default_factory=deque)
    inbox: deque[tuple[int, Reply]] = field(default_factory=deque)
    requests: dict[int, Request] = field(default_factory=dict)
    next_request: int = 1
    phase: str = "new"
    published: int | None = None
    round: int = 0
    promised: tuple[int, int] | None = None
    sources: tuple[Source, ...] = ()
    readable: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    """Of sources without a manifest: of how many segments the checksums are known."""
    content: tuple[tuple[bytes, bytes], ...] = ()
    """Layouts and manifests of what it reads from."""
    verified: int = 0
    alive: bool = True
    paused_until: float = 0.0

    def ask(self, message: Request) -> None:
        """Put a request on the wire."""
        self.requests[self.next_request] = message
        self.outbox.append((self.next_request, message))
        self.next_request += 1

    @property
    def filled(self) -> list[Cell]:
        """Return the memory that the present round fills."""
        return self.staged_cells if self.mode == "stage" else self.cells

    def unpublish(self) -> None:
        """Take the copy back; its memory is not used before the answer."""
        self.withdrawing = self.published
        self.ask(Unpublish())

    def read_from(self, sources: tuple[Source, ...]) -> None:
        """Read from these sources from now on."""
        self.sources = sources
        self.readable = {source.lease: SEGMENTS if source.whole else source.prefix for source in sources}

    def unstage(self) -> None:
        """Take the staged copy back; its memory is not used before the answer."""
        self.staged, self.unstaging = None, True
        self.ask(Unstage())


def sums(number: int, shard: int) -> bytes:
    """Return the checksums of a version's shard."""
    return b"sums %d %d" % (number, shard)


def cells_of(life: Life, placement: bytes) -> list[Cell]:
    """Return the memory that a placement names; offload memory that was freed holds nothing."""
    if placement == life.staging:
        return life.staged_cells
    return life.cells if placement == life.placement else life.offloads.get(placement, [None] * SEGMENTS)
