"""What a round is carried out with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tensorhub_core.client.access import SourceBook
from tensorhub_core.client.exactness import WHOLE_SEGMENTS, Exactness
from tensorhub_core.client.memory import FilledMemory
from tensorhub_core.client.progress import CheckCallback
from tensorhub_core.client.reading import Executor
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.state.messages import Reply, Request


class Wire(Protocol):
    """What a round needs of the session."""

    def submit(self, message: Request, answer: Callable[[Reply], None], *, life: int | None = None) -> int:
        """Send a request."""

    def tell(self, message: Request, life: int) -> None:
        """Send a request whose reply does not matter."""


@dataclass(frozen=True, slots=True)
class RoundParts:
    """What a round works with. `withdraw(done)` takes the old copy back and calls `done(error or None)` at its end."""

    wire: Wire
    memory: FilledMemory
    book: SourceBook
    executor: Executor
    withdraw: Callable[[Callable[[BaseException | None], None]], None]
    counters: WorkerCounters
    check: CheckCallback | None = None
    exactness: Exactness = WHOLE_SEGMENTS
