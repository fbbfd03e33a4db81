"""What the server notes of a zone with seed agents."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub_core.ids import ReplicaName, VersionKey


@dataclass(slots=True)
class Lead:
    """What a zone with seed agents has, and how far they are with what it has not (`state/zones.py`)."""

    newest: VersionKey | None = None
    """The newest version that has been whole at some replica of the zone since there were agents."""
    brought: VersionKey | None = None
    """The newest one that was whole at an agent."""
    bringing: VersionKey | None = None
    """The newest one that the zone has not and of which agents have had bytes; `marks`: how many, by shard."""
    marks: dict[int, int] = field(default_factory=dict)
    since_s: float = 0.0
    """When agents last came on, or had nothing left to bring."""
    late: bool = False
    """They did not come on for too long, and have not since: the zone does not wait for them."""
    agents: dict[ReplicaName, None] = field(default_factory=dict)
