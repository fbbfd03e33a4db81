"""Read memory of a peer through a transport alone: batches in a window, without checksums, hub or plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.transport.base import Batch, PeerId, ReadId, ReadState, Transport

CHUNK_BYTES = 4 << 20
WINDOW = 8
MOST_RUNS = 256
_PAUSE_S = 50e-6

Runs = Sequence[tuple[int, int, int]]
"""(local address, remote address, length_bytes) of every run."""


class RawReadError(Exception):
    """The transport could not read."""


def batches(runs: Runs, chunk_bytes: int = CHUNK_BYTES, most_runs: int = MOST_RUNS) -> list[Batch]:
    """Cut runs into batches of up to `chunk_bytes` and `most_runs`: long runs are split, short ones share a batch."""
    pieces = [
        (local + at, remote + at, min(chunk_bytes, length - at))
        for local, remote, length in runs
        for at in range(0, length, chunk_bytes)
    ]
    made: list[Batch] = []
    batch: list[tuple[int, int, int]] = []
    size = 0
    for piece in pieces:
        if batch and (size + piece[2] > chunk_bytes or len(batch) == most_runs):
            made.append(_batch(batch))
            batch, size = [], 0
        batch.append(piece)
        size += piece[2]
    return [*made, _batch(batch)] if batch else made


def _batch(pieces: Runs) -> Batch:
    table: NDArray[np.uint64] = np.array(pieces, np.uint64)
    return Batch(*(np.ascontiguousarray(column) for column in table.T))


def read_all(transport: Transport, peer: PeerId, todo: Sequence[Batch], window: int = WINDOW) -> None:
    """Read all batches, `window` of them in flight; raises RawReadError."""
    flights: list[ReadId] = []
    following = iter(todo)
    left = len(todo)
    while left:
        while len(flights) < window and (batch := next(following, None)) is not None:
            flights.append(transport.post(peer, batch))
        ended = []
        for read in flights:
            progress = transport.poll(read)
            if progress.state is ReadState.FAILED:
                raise RawReadError(progress.error)
            if progress.state is ReadState.DONE:
                ended.append(read)
        for read in ended:
            transport.close(read)
            flights.remove(read)
        left -= len(ended)
        if not ended:
            transport.wait(flights[:1], _PAUSE_S)
