"""Read a version through memory that is smaller than it, in one round: its sources stay leased until all of it came."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.client.connect import open_worker
from tensorhub_core.client.driver import RoundDriver
from tensorhub_core.client.identity import Identity
from tensorhub_core.client.machine import MAX_DISCARDS
from tensorhub_core.client.moves import LEAVE_GRACE_S, STOP_GRACE_S, lease_of
from tensorhub_core.client.piecewise import Passage, StartOver
from tensorhub_core.client.place import read_facts, settle
from tensorhub_core.client.progress import CheckCallback, ProgressCallback, ReadProgress
from tensorhub_core.client.reading import ReadEnd, ReadHandle, ReadOutcome, SourceAccess
from tensorhub_core.client.round_parts import RoundParts
from tensorhub_core.client.rounds import Broken, Phase, RoundState
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.client.versions import Version, wanted
from tensorhub_core.client.worker import Worker
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import StateError, VersionUnavailable
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.casting import Cast, check_cast
from tensorhub_core.layout.excerpts import Excerpts
from tensorhub_core.layout.match import match
from tensorhub_core.layout.pieces import SourceTables
from tensorhub_core.layout.read_plan import ReadPlan
from tensorhub_core.layout.segments import SegmentTable
from tensorhub_core.layout.types import Layout, TensorSpec
from tensorhub_core.limits import start_thread
from tensorhub_core.settings import Settings, load_settings
from tensorhub_core.state.messages import Unpublish
from tensorhub_core.transport.base import Transport

PIECES_BYTES = 256 << 20
"""Memory that a version passes through, where the setting `staging_bytes` says nothing; a larger tensor takes more."""
_POLL_S = 0.005
_LATE_S = LEAVE_GRACE_S + STOP_GRACE_S + 5.0
"""How much later than its own deadline a round may end."""

Use = Callable[[Iterator[RawTensor]], object]


class _WaitsForRoom:
    """What takes the place of a read between two portions; it ends VERIFIED when there is room for the next one."""

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self._outcome: ReadOutcome | None = None

    def advance(self, lease: str, prefix: int) -> None:
        """Do nothing: the next read begins with what may be read by then."""

    def know(self, lease: str, first: int, sums: NDArray[np.uint64]) -> None:
        """Do nothing: whole segments are read."""

    def fail(self, lease: str, reason: str, kind: str = "lost") -> None:
        """End, so that another source is looked for."""
        self._outcome = self._outcome or _over(ReadEnd.SOURCE_FAILED, lease, kind, reason)

    def cancel(self) -> None:
        """End."""
        self._outcome = _over(ReadEnd.CANCELLED)

    def wait(self, timeout_s: float) -> ReadOutcome | None:
        """Return the outcome, or None if there is no room after `timeout_s`."""
        if self._outcome is None and self._passage.take_room(timeout_s):
            self._outcome = _over(ReadEnd.VERIFIED)
        return self._outcome


def _over(end: ReadEnd, lease: str = "", kind: str = "", detail: str = "") -> ReadOutcome:
    return ReadOutcome(end, np.zeros(0, np.bool_), 0, lease, kind, detail)


class _ProgressOfAll(ReadProgress):
    """Hear a portion's progress as that of the whole version; `before_bytes` came with the portions before."""

    def __init__(
        self, callback: ProgressCallback | None, broken: Callable[[BaseException], None], total_bytes: int
    ) -> None:
        super().__init__(callback, broken)
        self.before_bytes, self._total_bytes = 0, total_bytes

    def on_progress(self, prefix: int, done_bytes: int, total_bytes: int, lease: str) -> None:
        """Hear how far the read of a portion is; on the executor's thread."""
        super().on_progress(0, self.before_bytes + done_bytes, self._total_bytes, lease)


class PiecewiseDriver(RoundDriver):
    """The round driver of a version that passes through: to the machine, its portions are one long read."""

    def __init__(
        self,
        state: RoundState,
        parts: RoundParts,
        life: int,
        deadline: Deadline,
        progress: ProgressCallback | None,
        *,
        passage: Passage,
    ) -> None:
        super().__init__(state, parts, life, deadline, progress)
        self._passage = passage
        self._of_all = _ProgressOfAll(progress, self._break, passage.memory.total_bytes)
        self._progress = self._of_all
        self._content: object = None
        self._excerpts: Excerpts | None = None
        self._casts: list[Cast] = []
        self._corrupt: set[str] = set()
        passage.on_given_up(self._break)

    def _break(self, error: BaseException) -> None:
        self.post(Broken(error))

    def _make_plan(self, keep: bool) -> None:
        """Plan the portion that comes next; portions that came from other bytes do not count."""
        content = (self._state.key, frozenset((source.layout, source.sums) for source in self._state.sources))
        if self._passage.begun and (not keep or content != self._content):
            self._passage.start_over()
            self._of_all.before_bytes, self._verified = 0, None
        self._content = content
        super()._make_plan(keep)

    def _read(self) -> None:
        if self._passage.take_room():
            super()._read()
        else:
            self._handle = _WaitsForRoom(self._passage)

    def _wait(self, handle: ReadHandle) -> ReadOutcome | None:
        if isinstance(handle, _WaitsForRoom):
            outcome = handle.wait(_POLL_S)
            if outcome is None or outcome.end is not ReadEnd.VERIFIED:
                return outcome
            self._handle = None
            self._read()
            return None
        outcome = super()._wait(handle)
        if outcome is None or outcome.end is not ReadEnd.VERIFIED or self._passage.complete:
            return outcome
        if self._state.phase in (Phase.STOPPING, Phase.LEAVING):
            return _over(ReadEnd.CANCELLED)  # it was to stop when this portion's read had just ended
        self._note(outcome)
        self._of_all.before_bytes += self._passage.table.total_bytes
        self._passage.pass_on()
        self._plan_next()
        self._read()
        return None

    def _plan_of(self, own: Layout, table: SegmentTable, accesses: Sequence[SourceAccess]) -> ReadPlan:
        """Plan a portion at its own cost: there may be thousands of them."""
        layouts, casts = [access.layout for access in accesses], self._parts.book.casts(accesses)
        if self._excerpts is None or not self._excerpts.are_of(layouts) or casts != self._casts:
            # A portion does not see what lacks.
            match(self._passage.memory.layout, layouts, SourceTables(layouts, None), casts)
            self._excerpts, self._casts = Excerpts(layouts, [access.table for access in accesses]), casts
        return self._excerpts.plan(own, [access.sums for access in accesses], self._exact(accesses), casts)

    def _plan_next(self) -> None:
        self._plan, self._verified = self._plan_of(self._passage.layout, self._passage.table, self._accesses), None

    def _readable(self, access: SourceAccess) -> SourceAccess:
        """Return the access with as much to read as is known by now; its lease may be known by another name today."""
        state = self._state
        today = next((s.lease for s in state.sources if lease_of(state, s.lease) == access.lease), access.lease)
        readable = super()._readable(dataclasses.replace(access, lease=today))
        return dataclasses.replace(readable, lease=access.lease)

    def _note(self, outcome: ReadOutcome) -> ReadOutcome:
        self._corrupt.update(outcome.corrupt)
        noted = super()._note(outcome)
        done_bytes = self._of_all.before_bytes + noted.done_bytes
        return dataclasses.replace(noted, done_bytes=done_bytes, corrupt=tuple(sorted(self._corrupt)))

    def _settle(self) -> bytes:
        self._passage.pass_on()
        return super()._settle()


class PieceReader(Worker):
    """A worker that lets versions pass through bounded memory; made by `connect_piecewise()`."""

    @contextmanager
    def passing(
        self,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        version: int | str = "latest",
        timeout_s: float | None = None,
        progress: ProgressCallback | None = None,
        *,
        have: VersionKey | None = None,
        check: CheckCallback | None = None,
    ) -> Iterator[PassingVersion]:
        """Begin to read a version's whole logical tensors, given as (name, dtype, shape); the block uses them.

        It is one round of all shards of the replica, whose sources stay leased until all of it came to every shard. If
        every shard says that it has the version (`have`), nothing passes. `check(layouts)` may refuse sources by
        raising LayoutMismatch. What the block raises breaks the round for all shards.
        """
        want, end = wanted(version), Deadline.after(self._call_s(timeout_s), time.monotonic())
        specs = [TensorSpec(*tensor) for tensor in tensors]
        shard, segment_bytes = self._identity, self._config.segment_bytes
        layout = build_layout(specs, shard=shard.shard, num_shards=shard.num_shards, segment_bytes=segment_bytes)
        limit_bytes = PIECES_BYTES if self._config.staging_bytes is None else self._config.staging_bytes
        passage = Passage(layout, limit_bytes)
        run = functools.partial(self._pass, passage, want, end, progress, have, check)
        thread = threading.Thread(target=run, name="tensorhub-pieces", daemon=True)
        start_thread(thread)
        try:
            yield PassingVersion(passage, end)
        except BaseException as error:
            passage.give_up(error)
            raise
        finally:
            passage.give_up(StateError("the version was not used to its end"))
            thread.join(_LATE_S)

    def _call_s(self, timeout_s: float | None) -> float:
        return self._config.call_timeout_s if timeout_s is None else timeout_s

    def _pass(
        self,
        passage: Passage,
        want: int | None,
        end: Deadline,
        progress: ProgressCallback | None,
        have: VersionKey | None,
        check: CheckCallback | None,
    ) -> None:
        """Carry the round out, on a thread of its own: the caller's uses what comes."""

        judged: list[Layout] = []

        def judge(layouts: Sequence[Layout]) -> None:
            if [*map(id, layouts)] == [*map(id, judged)]:
                return
            if check is not None:
                check(layouts)
            judged[:] = layouts

        try:
            with self._exclusively("passing"):
                # The server takes the memory for a holder of what passed before.
                self._session.request(Unpublish(), end)
                self._exchange(passage.memory)
                left_s = end.left_s(time.monotonic(), float("inf"))
                call, _, book = self._call("update", want, left_s, progress, False, judge)
                make = functools.partial(PiecewiseDriver, passage=passage)
                found = self._runner.pass_through(call, passage, book, have, make)
        except BaseException as error:
            passage.ended(error)
        else:
            passage.ended(found)


class PassingVersion:
    """A version that passes through; belongs to the thread that uses it."""

    def __init__(self, passage: Passage, end: Deadline) -> None:
        self._passage, self._deadline = passage, end

    def begins(self) -> bool:
        """Wait until some of it is there, verified; False: the memory holds the version already.

        Raises why it cannot be had; nothing has been used then.
        """
        return self._passage.wait_begun(self._left_s())

    def use(self, use: Use) -> tuple[Version, bytes]:
        """Have `use(tensors)` take all tensors, in order of their names, each before it asks for the next one.

        Returns the version and the digest of its checksums, once it is certain that all shards got it whole. `use` is
        called again from the beginning if what came turns out not to count. Raises what broke the round, or what `use`
        raised: it may then have used a part.
        """
        for _ in range(MAX_DISCARDS + 1):
            life = self._passage.life
            tensors = self._passage.tensors(life, self._left_s())
            try:
                use(tensors)
                for _ in tensors:  # which it had no use for
                    pass
            except Exception:
                if not self._passage.is_spoilt(life):
                    raise
            finally:
                tensors.close()
            try:
                what = self._passage.wait_end(life, self._left_s())
            except StartOver:
                continue
            assert what.sums is not None
            return Version.of(what.key), what.sums.digest
        raise VersionUnavailable(f"what came of the version did not count {MAX_DISCARDS + 1} times")

    def _left_s(self) -> float:
        return self._deadline.left_s(time.monotonic(), float("inf")) + _LATE_S


def connect_piecewise(
    server: str | Sequence[str] | None = None,
    *,
    model: str,
    replica: str,
    shard: int = 0,
    num_shards: int = 1,
    zone: str | None = None,
    host: str | None = None,
    rail: str | None = None,
    cast: Cast = False,
    transport: str | Transport = "auto",
    settings: Mapping[str, object] | Settings | None = None,
) -> PieceReader:
    """Connect a worker that offers nothing to anyone; arguments and errors as of `connect()`. Any thread."""
    filled = load_settings(settings)
    where = settle(filled, os.environ, read_facts(), zone=zone, host=host, rail=rail)
    identity = Identity(
        token=secrets.token_hex(16),
        model=model,
        replica=replica,
        shard=shard,
        num_shards=num_shards,
        zone=where.zone.value,
        host=where.host.value,
        rail=where.rail.value,
        spot=True,
        cast=check_cast(cast),
    )
    return open_worker(PieceReader, server, identity, transport, filled)
