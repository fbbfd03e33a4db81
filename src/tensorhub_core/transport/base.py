"""The data plane's one interface, small enough to fake (DESIGN.md section 6).

A transport has two sides that live apart (law L9). The *serving* side holds registered memory that peers read; the
*reading* side posts one-sided reads. `fence()` ends the reading side for good and starts a new one, so that no byte of
an earlier read can land any more; `revoke()` ends the serving side before registered memory is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

PeerId = NewType("PeerId", str)
ReadId = NewType("ReadId", int)


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous run of memory: few large ones are registered, segments lie inside them."""

    address: int
    length_bytes: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs to read in one transfer, as u64 arrays of equal length [runs]; both sides are on one device each."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    length_bytes: NDArray[np.uint64]
    local_device: str = "cpu"
    remote_device: str = "cpu"


class ReadState(Enum):
    """Where a posted read stands."""

    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Progress:
    """Answer of `poll`: `error` says why when FAILED.

    `idle` when ACTIVE: nothing has arrived from the peer that could be moved now, so whoever polls has time to spare.
    A transport that cannot tell says no.
    """

    state: ReadState
    error: str = ""
    idle: bool = False


class Transport(Protocol):
    """Move bytes from registered memory of a peer into registered memory of this process.

    All calls come from one thread at a time: the executor's, or the worker's own before and after it runs.
    """

    name: str

    @property
    def fills_devices(self) -> bool:
        """Tell whether bytes of a CPU's memory may land in a device's; elsewhere they have to go through the host's."""

    def register(self, regions: Sequence[Region]) -> None:
        """Make more regions readable by peers and writable by reads; raises TransportError and registers nothing.

        Peers see them in the next `describe()`. After a failure, earlier descriptions may be void: describe again.
        """

    def register_local(self, regions: Sequence[Region]) -> None:
        """Make regions writable by reads that no peer may read (staging); replaces the last such set.

        Raises TransportError and keeps the last set. No read may be in flight.
        """

    def deregister(self) -> None:
        """Forget all regions. Call `revoke()` or make sure that nobody reads first."""

    def describe(self) -> bytes:
        """Return what a peer needs for `attach`: the serving agent's metadata, after `register`."""

    def attach(self, description: bytes) -> PeerId:
        """Connect the reading side to a peer; raises TransportError within a bounded time.

        May return before the peer has answered; then the first read fails. A newer description of an attached peer
        takes the older one's place: the older `PeerId` is then unknown. After an error all peers may be unknown.
        """

    def detach(self, peer: PeerId) -> None:
        """Drop a peer; unknown peers are ignored."""

    def post(self, peer: PeerId, batch: Batch) -> ReadId:
        """Start one read; may block for one chunk.

        Raises TransportError if the peer is known to be gone, if a run lies outside the registered regions of either
        side, and as long as a read that was closed unquiet has not been fenced. Nothing lands after such an error.
        """

    def poll(self, read: ReadId) -> Progress:
        """Say where a read stands. Never blocks."""

    def wait(self, reads: Sequence[ReadId], timeout_s: float) -> None:
        """Wait until polling one of some ACTIVE reads may be worthwhile, for about `timeout_s` or a few milliseconds.

        One read of each peer is enough, the first one that was posted. May move bytes of reads from the same peers.
        """

    def close(self, read: ReadId) -> bool:
        """Forget a read and return whether it is quiet: True only if no byte of it can land any more.

        Unknown reads, so also those from before a fence, are quiet.
        """

    def fence(self) -> None:
        """Drop the reading side and make a new one: after it, no byte of an earlier read can land. Peers are lost."""

    def revoke(self) -> None:
        """Drop the serving side: peers' reads fail from now on. `register` again to serve again."""

    def shutdown(self) -> None:
        """End both sides; idempotent."""
