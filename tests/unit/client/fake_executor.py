"""An executor for tests that copies inside this process, as fast or slowly and as badly as the test says."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub_core.client.reading import Destination, ReadEnd, ReadObserver, ReadOutcome, SourceAccess
from tensorhub_core.layout.plan import ReadPlan
from tensorhub_core.layout.scatter import scatter_bytes
from tensorhub_core.layout.segments import segment_box


@dataclass
class FakeExecutor:
    """Reads one segment after the other; `before(job, read)` is called before each, and may block or raise Broken."""

    before: Callable[[Job, int], None] = lambda job, read: None
    jobs: list[Job] = field(default_factory=list)
    closed: bool = False

    def start(
        self,
        plan: ReadPlan,
        sources: Sequence[SourceAccess],
        destination: Destination,
        verified: NDArray[np.bool_] | None,
        observer: ReadObserver,
    ) -> Job:
        job = Job(self, plan, sources, destination, verified, observer)
        self.jobs.append(job)
        job.thread.start()
        return job

    def close(self) -> None:
        self.closed = True
        for job in self.jobs:
            job.cancel()
            job.thread.join()


class SourceBroken(Exception):
    """Raised by `before`: the source fails with this kind."""


class Job:
    """One read job on a thread of its own."""

    def __init__(
        self,
        executor: FakeExecutor,
        plan: ReadPlan,
        sources: Sequence[SourceAccess],
        destination: Destination,
        verified: NDArray[np.bool_] | None,
        observer: ReadObserver,
    ) -> None:
        self.executor, self.plan, self.sources, self.observer = executor, plan, list(sources), observer
        self.destination = destination
        self.verified = np.zeros(len(plan), np.bool_) if verified is None else verified.copy()
        self.read: list[int] = []
        self.allowed = {source.lease: source.prefix for source in sources}
        self.lost: dict[str, tuple[str, str]] = {}
        self.known: dict[str, dict[int, int]] = {}
        self.changed = threading.Condition()
        self.cancelled = False
        self.outcome: ReadOutcome | None = None
        self.thread = threading.Thread(target=self._run)

    def advance(self, lease: str, prefix: int) -> None:
        with self.changed:
            self.allowed[lease] = max(prefix, self.allowed.get(lease, 0))
            self.changed.notify_all()

    def know(self, lease: str, first: int, sums: NDArray[np.uint64]) -> None:
        self.known.setdefault(lease, {}).update(enumerate(sums.tolist(), first))

    def fail(self, lease: str, reason: str, kind: str = "lost") -> None:
        with self.changed:
            self.lost[lease] = (kind, reason)
            self.changed.notify_all()

    def cancel(self) -> None:
        with self.changed:
            self.cancelled = True
            self.changed.notify_all()

    def wait(self, timeout_s: float) -> ReadOutcome | None:
        self.thread.join(timeout_s)
        return None if self.thread.is_alive() else self.outcome

    def until(self, condition: Callable[[], bool]) -> None:
        """Block the read until something holds, or the job has to end."""
        with self.changed:
            while not (condition() or self.cancelled or self.lost):
                self.changed.wait(0.01)

    def _end(self, end: ReadEnd, lease: str = "", kind: str = "", detail: str = "") -> None:
        done = int(self.plan.length_bytes[self.verified].sum())
        self.outcome = ReadOutcome(end, self.verified, done, lease, kind, detail)

    def _run(self) -> None:
        for index in range(len(self.plan)):
            if self.verified[index]:
                continue
            source = self.sources[int(self.plan.source[index])]
            segment = int(self.plan.segment[index])
            try:
                self.executor.before(self, index)
            except SourceBroken as broken:
                return self._end(ReadEnd.SOURCE_FAILED, source.lease, str(broken), "as told")
            self.until(lambda s=source, k=segment: self.allowed[s.lease] > k)  # type: ignore[misc]
            if self.cancelled:
                return self._end(ReadEnd.CANCELLED)
            if self.lost:
                lease, (kind, reason) = next(iter(self.lost.items()))
                return self._end(ReadEnd.SOURCE_FAILED, lease, kind, reason)
            data = self._fetch(source, segment)
            if xxhash.xxh3_64_intdigest(data) != int(source.sums[segment]):
                return self._end(ReadEnd.SOURCE_FAILED, source.lease, "corrupt", "checksum")
            self._put(index, source, segment, data)
            self.verified[index] = True
            self.read.append(index)
            prefix = len(self.plan) if self.verified.all() else int(np.argmin(self.verified))
            done = int(self.plan.length_bytes[self.verified].sum())
            self.observer.on_progress(prefix, done, self.plan.total_bytes, source.lease)
        self._end(ReadEnd.VERIFIED)

    def _fetch(self, source: SourceAccess, segment: int) -> bytes:
        storage = int(source.table.storage[segment])
        address = int(source.addresses[storage]) + int(source.table.offset_bytes[segment])
        return ctypes.string_at(address, int(source.table.length_bytes[segment]))

    def _put(self, index: int, source: SourceAccess, segment: int, data: bytes) -> None:
        layout, array = self.destination.layout, np.frombuffer(data, np.uint8)
        if self.plan.direct[index]:
            address = int(self.destination.addresses[self.plan.storage[index]]) + int(self.plan.offset_bytes[index])
            ctypes.memmove(address, data, len(data))
            return
        box = segment_box(source.layout, source.table, segment)
        for scatter in self.plan.scatters[index]:
            spec = layout.tensors[layout.storages[scatter.storage][0]]
            buffer = self.destination.buffers[scatter.storage]
            assert buffer is not None
            elements = int(np.prod(spec.shape, dtype=np.int64))
            scatter_bytes(array, box.shape, scatter, buffer, spec.shape, len(buffer) // elements)
