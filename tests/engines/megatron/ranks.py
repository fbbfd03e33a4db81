"""Processes that are the ranks of one training job: they stay, and run one function after the other.

    with Ranks(2) as ranks:
        results = ranks.run(function, arguments)      # [what function(rank, *arguments) returned on each rank]

Functions are module-level ones, called with a gloo group of all ranks in place; Megatron is imported and on the CPU.
All jobs are forked from one process that has imported it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 90.0
RUN_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0


class Ranks:
    """A job of `world` ranks. A function that fails or hangs on any rank ends the whole job."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="tensorhub-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.preload"])
        meeting = f"file://{self._folder.name}/meeting"
        pipes = [context.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, world, meeting, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with _path_of_root():
            for process in self._processes:
                process.start()
        for _, theirs in pipes:
            theirs.close()
        self._collect(START_TIMEOUT_S)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = RUN_TIMEOUT_S) -> list[Any]:
        """Call `function(rank, *args)` on all ranks at the same time; return their results by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect(timeout_s)

    def _collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            # Others of a rank that failed may wait for it in a collective call: they get little time.
            patience_s = 2.0 if failures else deadline - time.monotonic()
            try:
                if not pipe.poll(max(0.0, patience_s)):
                    failures.append(f"rank {rank} did not answer in {timeout_s} s")
                    continue
                ok, value = pipe.recv()
            except (EOFError, OSError) as error:
                ok, value = False, f"it ended: {error!r}"
            if ok:
                results.append(value)
            else:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def end(self, rank: int) -> None:
        """End one rank, wherever it is."""
        self._processes[rank].kill()

    @property
    def is_closed(self) -> bool:
        """Tell whether the job has ended."""
        return not self._pipes

    def close(self) -> None:
        """End all ranks; idempotent."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _END_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes = []
        self._processes = []
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _path_of_root:
    """Let the process from which ranks are forked find the tests."""

    def __enter__(self) -> None:
        self._before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), self._before)))
        os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self._before


def _serve(rank: int, world: int, meeting: str, pipe: Connection) -> None:
    import torch.distributed

    from . import preload

    assert preload
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    pipe.send((True, None))
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = True, function(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            break
    os._exit(0)
