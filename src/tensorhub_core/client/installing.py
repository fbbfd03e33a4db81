"""Install what is staged: a round whose read is a copy within this machine, by several threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.awaiting import Bell
from tensorhub_core.client.device import fill_device
from tensorhub_core.client.driver import RoundDriver
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.progress import ProgressCallback
from tensorhub_core.client.reading import ReadEnd, ReadHandle, ReadObserver, ReadOutcome
from tensorhub_core.client.round_parts import RoundParts
from tensorhub_core.client.rounds import Broken, Planned, RoundState
from tensorhub_core.client.staged_memory import StagedMemory
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import TransportError
from tensorhub_core.limits import start_thread
from tensorhub_core.state.messages import PutBlob

CHUNK_BYTES = 16 << 20
"""What a thread copies between two looks at whether it has to stop."""
MOST_THREADS = 8
"""More do not copy faster on the machines we know: memory is the bottleneck by then."""
_POLL_S = 0.005

Run = tuple[int, int, int]
"""(address to write, address to read, bytes)."""


@dataclass(slots=True)
class CopyList:
    """What has to be copied: `chunks` of about equal size for the CPU, `device_storages` by their number."""

    memory: RegisteredMemory
    staged: StagedMemory
    chunks: list[list[Run]] = field(default_factory=list)
    device_storages: list[int] = field(default_factory=list)
    total_bytes: int = 0


def list_copies(memory: RegisteredMemory, staged: StagedMemory, chunk_bytes: int = CHUNK_BYTES) -> CopyList:
    """List the copies that fill `memory`; large storages are cut, small ones put together."""
    copies = CopyList(memory, staged, total_bytes=sum(storage.length_bytes for storage in memory.storages))
    runs = zip(memory.addresses.tolist(), staged.addresses.tolist(), memory.buffers, strict=True)
    room = 0
    for number, (address, source, buffer) in enumerate(runs):
        if buffer is None:
            copies.device_storages.append(number)
            continue
        for offset, length in _pieces(len(buffer), chunk_bytes):
            if length > room:
                copies.chunks.append([])
                room = chunk_bytes
            copies.chunks[-1].append((address + offset, source + offset, length))
            room -= length
    return copies


def _pieces(length: int, most: int) -> Iterator[tuple[int, int]]:
    for offset in range(0, length, most):
        yield offset, min(most, length - offset)


def copy_threads() -> int:
    """Return how many threads copy."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cpus))


class LocalCopy:
    """A running copy; the `ReadHandle` of an install. It ends VERIFIED: what is staged was verified on its way in."""

    def __init__(self, copies: CopyList, observer: ReadObserver, threads: int) -> None:
        """Begin to copy; raises TransportError if no thread can be started for it."""
        self._copies, self._observer = copies, observer
        self._chunks = iter(copies.chunks)
        self._helpers = min(threads, len(copies.chunks)) - 1
        self._cancelled = False
        self._error: BaseException | None = None
        self._copied_bytes = 0
        self._counting = threading.Lock()
        self._ended = Bell()
        self._outcome: ReadOutcome | None = None
        start_thread(threading.Thread(target=self._lead, name="tensorhub-install", daemon=True))

    def advance(self, lease: str, prefix: int) -> None:
        """Do nothing: there is no source."""

    def know(self, lease: str, first: int, sums: NDArray[np.uint64]) -> None:
        """Do nothing: there is no source."""

    def fail(self, lease: str, reason: str, kind: str = "lost") -> None:
        """Do nothing: there is no source."""

    def cancel(self) -> None:
        """Stop after the chunks that are being copied."""
        self._cancelled = True

    def wait(self, timeout_s: float) -> ReadOutcome | None:
        """Return the outcome, or None if the copy still runs after `timeout_s`; raises what broke it."""
        self._ended.wait_for(lambda: self._outcome is not None, timeout_s)
        if self._outcome is not None and self._error is not None:
            raise self._error
        return self._outcome

    def _lead(self) -> None:
        helpers: list[threading.Thread] = []
        with contextlib.suppress(TransportError):  # those that there are do it all
            for _ in range(self._helpers):
                helper = threading.Thread(target=self._copy, name="tensorhub-install-helper", daemon=True)
                start_thread(helper)
                helpers.append(helper)
        self._copy(leads=True)
        for helper in helpers:
            helper.join()
        complete = not self._cancelled and self._error is None
        if complete:
            self._observer.on_progress(0, self._copies.total_bytes, self._copies.total_bytes, "")
        end = ReadEnd.VERIFIED if complete else ReadEnd.CANCELLED
        self._outcome = ReadOutcome(end, np.zeros(0, np.bool_), self._copies.total_bytes if complete else 0)
        self._ended.ring()

    def _copy(self, leads: bool = False) -> None:
        """Copy until nothing is left; the thread that leads also fills devices and reports."""
        move = ctypes.memmove  # gives up the interpreter lock while it copies
        try:
            if leads:
                self._fill_devices()
            for chunk in self._chunks:
                if self._cancelled:
                    return
                for run in chunk:
                    move(*run)
                with self._counting:
                    self._copied_bytes += sum(run[2] for run in chunk)
                if leads and self._copied_bytes < self._copies.total_bytes:
                    self._observer.on_progress(0, self._copied_bytes, self._copies.total_bytes, "")
        except BaseException as error:
            self._error, self._cancelled = error, True

    def _fill_devices(self) -> None:
        for number in self._copies.device_storages:
            storage, data = self._copies.memory.storages[number], self._copies.staged.buffers[number]
            if storage.length_bytes and data is not None and not self._cancelled:
                fill_device(storage.view.device, storage.address, data)
        if self._copies.device_storages:
            self._copies.memory.synchronize()


class InstallDriver(RoundDriver):
    """The round driver of an install: nothing to plan, a local copy as its read, checksums that are known already."""

    def __init__(
        self,
        state: RoundState,
        parts: RoundParts,
        life: int,
        deadline: Deadline,
        progress: ProgressCallback | None,
        *,
        copies: CopyList,
        staged_sums: PutBlob,
        converted: bool = False,
    ) -> None:
        super().__init__(state, parts, life, deadline, progress)
        self._copies, self._staged_sums, self._converted = copies, staged_sums, converted

    def _make_plan(self, keep: bool) -> None:
        self.post(Planned(self._converted))

    def _read(self) -> None:
        self._show(None)
        self._handle = LocalCopy(self._copies, self._progress, copy_threads())

    def _wait(self, handle: ReadHandle) -> ReadOutcome | None:
        try:
            return handle.wait(_POLL_S)
        except Exception as error:  # no thread copies any more: the memory is dirty, but nothing lands in it
            self._handle = None
            self.post(Broken(error))
            return None

    def _settle(self) -> bytes:
        self._copies.memory.spread()
        self.sums = self._staged_sums
        return self.sums.digest
