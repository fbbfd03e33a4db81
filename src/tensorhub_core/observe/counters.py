"""Count what a worker did since it connected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WorkerCounters:
    """Running totals of one worker; written by the thread that makes the call, readable from any.

    `rereads` counts segments that failed their checksum and were read again, `failovers` the times a source was left
    for another one, `fences` the reads that ended unquiet, `discards` the reads that the server had thrown away,
    `drains` the copies taken back, `reconnects` the times the session said hello again.
    """

    published: int = 0
    commits: int = 0
    bytes_read: int = 0
    rereads: int = 0
    failovers: int = 0
    fences: int = 0
    discards: int = 0
    drains: int = 0
    aborted_rounds: int = 0
    reconnects: int = 0
