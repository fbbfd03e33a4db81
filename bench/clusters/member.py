"""A trainer or a rollout of a mini-cluster: a `nodes.Node` that acts at given moments, and ranks of a collective.

All moments are those of the monotonic clock, which the processes of one machine share. A rollout "pauses" when its GPU
stops to serve, and goes on when the new weights are in its memory: the time between is its stall.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
from content import digest
from nodes import Node
from remote import Say, answer

from tensorhub_core.transport.base import Region
from tensorhub_core.transport.registry import make_transport

INTERFACE = "eth0"
COLLECTIVE_TIMEOUT_S = 60.0
_AT_ONCE = 4
"""Pieces of a collective that are on their way at the same time."""


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment, at once if it has passed."""
    time.sleep(max(0.0, moment_s - time.monotonic()))


class Member(Node):
    """The process: ours by `update_at`, `stage_at`, `follow`, a star by `star`, a rank by `join` and `collective`."""

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self._packed: Any = None

    def do_publish_at(self, at_s: float, version: int) -> dict[str, float]:
        """Publish at a moment; say when it was done."""
        sleep_until(at_s)
        began = time.monotonic()
        self.do_publish(version)
        return {"began_s": began, "ended_s": time.monotonic()}

    def do_release_at(self, at_s: float, timeout_s: float) -> dict[str, float]:
        """Take the memory back at a moment, as the next optimizer step does."""
        sleep_until(at_s)
        return self.do_unpublish(timeout_s)

    def do_update_at(self, at_s: float, version: int, timeout_s: float) -> dict[str, Any]:
        """Pause at a moment and update."""
        sleep_until(at_s)
        got: dict[str, Any] = self.do_replicate(version, timeout_s, update=True)
        return {**got, "paused_s": got["began_s"]}

    def do_stage_at(self, at_s: float, version: int, timeout_s: float) -> dict[str, Any]:
        """Fetch a version beside what is served, from a moment on; pause only to install it."""
        assert self.worker is not None
        sleep_until(at_s)
        began = time.monotonic()
        staged = self.worker.stage(version, timeout_s)
        paused = time.monotonic()
        got = staged.install(timeout_s)
        return {"version": int(got), "began_s": began, "paused_s": paused, "ended_s": time.monotonic()}

    def do_follow(self, newer_than: int, timeout_s: float) -> dict[str, Any]:
        """Serve until the hub says that there is a newer version here, then pause and update."""
        assert self.worker is not None
        self.worker.wait(newer_than, timeout_s)
        got: dict[str, Any] = self.do_replicate("latest", timeout_s, update=True)
        return {**got, "paused_s": got["began_s"]}

    def do_star(self, at_s: float, **arguments: Any) -> dict[str, float]:
        """Pause at a moment and read everything from the process that `raw_serve`s."""
        sleep_until(at_s)
        got = self.do_raw_read(**arguments)
        return {**got, "paused_s": got["began_s"]}

    def do_raw_prepare(self, transport: str) -> None:
        """Have a raw transport ready, with the arrays registered."""
        self._raw = make_transport(transport, interface=INTERFACE)
        self._raw.register([Region(array.ctypes.data, array.nbytes) for array in self.arrays.values()])

    def do_raw_end(self) -> None:
        """Give back the raw transport, so that another can be used."""
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.shutdown()

    def do_pack(self) -> None:
        """Copy the arrays into the one buffer that collectives use; not part of any measurement."""
        import torch

        self._packed = torch.from_numpy(np.concatenate(list(self.arrays.values())))

    def do_packed_digest(self) -> str:
        """Return the digest of the buffer, cut into the arrays."""
        cuts = np.cumsum([len(array) for array in self.arrays.values()])[:-1]
        return digest(dict(zip(self.arrays, np.split(self._packed.numpy(), cuts), strict=True)))

    def do_join(self, rank: int, size: int, url: str) -> dict[str, float]:
        """Leave the group this was in, and become a rank of a new one; all ranks call it at once."""
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        self.do_leave()
        began = time.monotonic()
        limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=limit)
        distributed.barrier()
        return {"began_s": began, "ended_s": time.monotonic()}

    def do_leave(self) -> None:
        """Leave the group."""
        import torch.distributed as distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()

    def do_collective(self, at_s: float, way: str, piece_bytes: int) -> dict[str, float]:
        """Pause at a moment and take part: rank 0 sends, all others end up with its bytes."""
        pieces = list(self._packed.split(piece_bytes))
        sleep_until(at_s)
        began = time.monotonic()
        if way == "broadcast":
            broadcast(pieces)
        else:
            pass_on(pieces)
        return {"paused_s": began, "began_s": began, "ended_s": time.monotonic()}

    def close(self) -> None:
        """Leave the group, close worker and transport."""
        with contextlib.suppress(ImportError):
            self.do_leave()
        super().close()


def broadcast(pieces: list[Any]) -> None:
    """Broadcast the pieces, several on their way at once."""
    import torch.distributed as distributed

    waiting: list[Any] = []
    for piece in pieces:
        if len(waiting) == _AT_ONCE:
            waiting.pop(0).wait()
        waiting.append(distributed.broadcast(piece, 0, async_op=True))
    for work in waiting:
        work.wait()


def pass_on(pieces: list[Any]) -> None:
    """Broadcast as NCCL does on one ring: every rank passes each piece on while it takes the next."""
    import torch.distributed as distributed

    rank, last = distributed.get_rank(), distributed.get_world_size() - 1
    coming: list[Any] = []
    going: list[Any] = []
    if rank:
        coming = [distributed.irecv(piece, rank - 1, tag=tag) for tag, piece in enumerate(pieces[:_AT_ONCE])]
    for number, piece in enumerate(pieces):
        if rank:
            coming.pop(0).wait()
            following = number + _AT_ONCE
            if following < len(pieces):
                coming.append(distributed.irecv(pieces[following], rank - 1, tag=following))
        if rank < last:
            if len(going) == _AT_ONCE:
                going.pop(0).wait()
            going.append(distributed.isend(piece, rank + 1, tag=number))
    for work in going:
        work.wait()


def main() -> None:
    """Serve commands until the input ends."""
    made: list[Member] = []

    def begin(say: Say) -> Any:
        made.append(Member(say))
        return made[0].commands()

    answer(begin)
    made[0].close()


if __name__ == "__main__":
    main()
