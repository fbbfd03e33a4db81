"""Name the identities that travel between parts, so that mypy keeps them apart.

Worker, copy, lease and ticket ids are never reused and contain the server's epoch (law L8).
"""

from __future__ import annotations

from typing import NewType

ModelName = NewType("ModelName", str)
ReplicaName = NewType("ReplicaName", str)

ServerEpoch = NewType("ServerEpoch", int)
StreamEpoch = NewType("StreamEpoch", int)

SessionId = NewType("SessionId", bytes)
"""The ROUTER identity of one client connection."""

WorkerId = NewType("WorkerId", str)
CopyId = NewType("CopyId", str)
LeaseId = NewType("LeaseId", str)
TicketId = NewType("TicketId", str)

Digest = NewType("Digest", bytes)
"""128-bit xxh3 of a blob's bytes: layouts, placements and sums are content-addressed."""

VersionKey = tuple[int, int]
"""(stream epoch, number): versions compare as this pair (law L10)."""
