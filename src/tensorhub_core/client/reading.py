"""What the worker hands to the executor to read a version, and what it gets back: records and interfaces, no threads.

The executor thread owns the transport while a read runs. It calls `ReadObserver` from that thread; the worker calls
`ReadHandle` from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.prefix_word import PrefixPage
from tensorhub_core.layout.plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout


@dataclass(frozen=True, slots=True)
class SourceAccess:
    """One leased source: `addresses` u64 [storages], `devices` one name per storage, `sums` u64 [segments].

    `prefix` segments may be read now; a whole source has `prefix == len(sums)`. `converted`: its numbers were converted
    from another dtype. `known`: of how many segments the checksums are known yet; None = of all. `word`: the address at
    which it shows how many segments of the manifest with this `tag` are verified (`prefix_word`); 0 = nowhere.
    """

    lease: str
    replica: str
    description: bytes
    layout: Layout
    table: SegmentTable
    addresses: NDArray[np.uint64]
    devices: tuple[str, ...]
    sums: NDArray[np.uint64]
    prefix: int
    converted: bool = False
    known: int | None = None
    word: int = 0
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Destination:
    """The registered memory to fill: `addresses` u64 [storages]; `buffers` one writable flat uint8 view per storage.

    For storages on devices the buffer is None: only their `DeviceMemory` can work on them. `page`: where the words of
    sources may land; without it the server alone says how far to read.
    """

    layout: Layout
    table: SegmentTable
    addresses: NDArray[np.uint64]
    devices: tuple[str, ...]
    buffers: Sequence[NDArray[np.uint8] | None]
    page: PrefixPage | None = None


class ReadEnd(Enum):
    """How a read job ended."""

    VERIFIED = "verified"
    SOURCE_FAILED = "source_failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """End of a read job; after it no byte can land any more (the executor fenced if a read was not quiet).

    `kind` is that of a `LeaseFailure` when SOURCE_FAILED. `verified` bool [reads of the plan]: which reads of the plan
    are in place and verified; pass it to the next job to read only the missing ones. `corrupt` names the leases of
    sources that gave wrong bytes for a segment which another source then gave right.
    """

    end: ReadEnd
    verified: NDArray[np.bool_]
    done_bytes: int
    lease: str = ""
    kind: str = ""
    detail: str = ""
    fenced: bool = False
    rereads: int = 0
    corrupt: tuple[str, ...] = ()


class ReadObserver(Protocol):
    """Hear about a running read, on the executor thread; must not block."""

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Hear that the first `prefix` reads of the plan are verified, and `done_bytes` of `total_bytes` in all."""


class ReadHandle(Protocol):
    """Steer a running read from any thread."""

    def advance(self, lease: str, prefix: int) -> None:
        """Allow reading up to `prefix` segments of the source."""

    def know(self, lease: str, first: int, sums: NDArray[np.uint64]) -> None:
        """Hear the checksums, u64 [n], of cuts `first .. first + n` of a source, numbered as in `ReadPlan.cuts_of`.

        A cut is read only when its checksum is known, unless it is not compared (`verify`). Unknown leases are ignored,
        and so are numbers beyond the last cut. What was heard once stays. In a raw plan the same goes for segments of a
        source of which not all checksums were known.
        """

    def fail(self, lease: str, reason: str, kind: str = "lost") -> None:
        """Stop reading a source that the server says is lost, or too slow; the job ends SOURCE_FAILED of this kind."""

    def cancel(self) -> None:
        """Stop the job as soon as possible; it ends CANCELLED."""

    def wait(self, timeout_s: float) -> ReadOutcome | None:
        """Return the outcome, or None if the job still runs after `timeout_s`."""


class Executor(Protocol):
    """Own the transport's reading side and one thread that runs one read job at a time."""

    def start(
        self,
        plan: ReadPlan,
        sources: Sequence[SourceAccess],
        destination: Destination,
        verified: NDArray[np.bool_] | None,
        observer: ReadObserver,
    ) -> ReadHandle:
        """Begin a job; raises StateError if one runs."""

    def close(self) -> None:
        """Stop the thread; joins it within a bounded time."""
