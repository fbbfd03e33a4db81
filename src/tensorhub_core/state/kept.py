"""What the server notes of how a version is kept, and of how copies are withdrawn (law L11)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub_core.ids import ReplicaName


@dataclass(slots=True)
class Keeping:
    """How a version is kept (law L11); `state/keeping.py` keeps the first three up to date.

    `whole` and `held`: replicas that publish all of it in registered or offload memory, and those that have all of it
    there though some shard is withdrawing it; `firm`: those of the latter that are not spot. Of those that withdraw it,
    `custody` have to keep it, `let_go` need not.
    """

    whole: set[ReplicaName] = field(default_factory=set)
    held: set[ReplicaName] = field(default_factory=set)
    firm: set[ReplicaName] = field(default_factory=set)
    custody: set[ReplicaName] = field(default_factory=set)
    let_go: set[ReplicaName] = field(default_factory=set)
    secured_by: ReplicaName | None = None
    """The first reliable replica other than the publisher's at which it was whole."""
    released: bool = False
    """It is not retained any more."""
    safe: bool = False
    reachable: bool = False
    """A reliable replica has it, and any replica has it, unless a failure took the last one."""


@dataclass(slots=True)
class DrainCount:
    """How many copies of a model were withdrawn, and how long they drained."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def note(self, drained_s: float) -> None:
        """Count a copy that was withdrawn."""
        self.count += 1
        self.total_s += drained_s
        self.max_s = max(self.max_s, drained_s)
