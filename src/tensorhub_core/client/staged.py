"""Stage a version in host memory while the old one serves, and install it by a local copy."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from tensorhub_core.client.access import SourceBook
from tensorhub_core.client.drain import Drain, error_of
from tensorhub_core.client.holding import Holding
from tensorhub_core.client.identity import checked
from tensorhub_core.client.installing import CopyList, list_copies
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.runner import Call, RoundRunner, StagedVersion
from tensorhub_core.client.versions import Version
from tensorhub_core.clock import Deadline
from tensorhub_core.errors import StateError, TensorHubError
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.messages import PutBlob, RegisterStaging, Unstage

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class StagedEnds:
    """What the worker does with a staged version; beside it: (timeout_s, publish), (timeout_s), (hurry)."""

    install: Callable[[StagedVersion, float | None, bool], Version]
    discard: Callable[[StagedVersion, float | None], None]
    leave: Callable[[StagedVersion, bool], None]


class Staged:
    """A version in host staging memory, made by `Worker.stage()`; a context manager that discards what is left.

    Its methods belong to the thread that calls the worker's. It may serve the version to others all the time.
    """

    def __init__(
        self,
        what: StagedVersion,
        total_bytes: int,
        digest: bytes | None,
        ends: StagedEnds,
    ) -> None:
        """`Worker.stage()` does this."""
        self._what, self._ends = what, ends
        self._total_bytes, self._digest = total_bytes, digest

    @property
    def version(self) -> Version:
        """Return the staged version."""
        return Version.of(self._what.key)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the worker's shard of the version."""
        return self._total_bytes

    @property
    def digest(self) -> bytes | None:
        """Return the xxh3_128 of the version's verified checksums, as `Worker.digest` says it after the install."""
        return self._digest

    def install(self, timeout_s: float | None = None, publish: bool = True) -> Version:
        """Copy the version into the registered memory and publish it; return it.

        All shards of the replica install together: no byte of any of them is overwritten before all have said that they
        staged this version. The old copy is taken back first. `publish=False` as for `replicate`. Returns at once if
        there was nothing to stage. Raises StateError (discarded, installed, other shards staged another version, the
        memory holds a newer version than the staged `latest`), DeadlineExceeded after `timeout_s`; if the memory was
        touched by then, it is dirty. The version stays staged after an error: call again, or `discard()`.
        """
        return self._ends.install(self._what, timeout_s, publish)

    def discard(self, timeout_s: float | None = None) -> None:
        """Give the staging memory back, after its readers have left; also after an install, which keeps it.

        Raises DeadlineExceeded after `timeout_s`: no new reader comes, and calling again goes on waiting. Idempotent.
        """
        self._ends.discard(self._what, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Discard the version unless it was installed, also if its readers do not leave in time; never raises."""
        self._ends.leave(self._what, error is not None)


class Stager:
    """What one worker has staged; calls come from the thread that holds the worker's lock."""

    def __init__(self, runner: RoundRunner, resources: Resources, holding: Holding, limit_bytes: int | None) -> None:
        self._runner, self._resources, self._session = runner, resources, resources.session
        self._holding, self._limit_bytes = holding, limit_bytes
        self._offered = False
        """The server may know a staged copy of this worker."""
        self._drain = Drain(self._session.submit, self._withdrawn, Unstage())
        self._current: StagedVersion | None = None
        self._copies: CopyList | None = None
        self._wanted = False
        self._handle: weakref.ref[Staged] | None = None

    def handed_out(self, staged: Staged) -> Staged:
        """Note what the caller has of the staged version, and return it."""
        self._handle = weakref.ref(staged)
        return staged

    def discard_lost(self, deadline: Deadline, call: str) -> None:
        """Discard a staged version that nobody can install or discard any more: its `Staged` is gone.

        An interruption (Ctrl-C) may come between the end of `stage()` and its caller.
        """
        if self._holding.staged is not None and (self._handle is None or self._handle() is None):
            self.withdraw(deadline, call)
            self._free()

    def stage(self, call: Call, live: RegisteredMemory, book: SourceBook) -> tuple[StagedVersion, bytes | None]:
        """Fill the staging memory; returns what is in it, and the digest of its checksums."""
        self._handle = None
        self.withdraw(call.deadline, "stage()")
        room = self._resources.room
        room.holds = None
        memory = room.open(live, self._limit_bytes)
        try:
            blob = PutBlob(digest_of(room.placement), room.placement)
            self._session.staging = (blob, RegisterStaging(blob.digest))
            for message in self._session.staging:
                self._session.request(message, call.deadline)
            self._offered = True
            what = self._runner.stage(call, memory, book, room.executor, self._take_back)
            copies = list_copies(live, memory)  # now, because install() is to be short
        except BaseException:
            self._give_up()
            raise
        if what.sums is None:
            self._offered = False
            return what, self._holding.digest
        self._current, self._copies = what, copies
        room.holds = (what.key, what.sums, what.converted)
        self._holding.staged, self._wanted = what.key, call.want is not None
        return what, what.sums.digest

    def install(self, what: StagedVersion, call: Call, live: RegisteredMemory, book: SourceBook) -> Version:
        """Copy what is staged into the registered memory; the staging memory serves on until its readers have left."""
        if what.sums is None:
            if self._holding.held != what.key or self._holding.dirty:
                raise StateError(f"the memory does not hold version {what.key[1]} any more: call stage() again")
            return Version.of(what.key)
        self._holding.check_install(what.key, self._wanted)
        assert self._copies is not None
        version = self._runner.install(call, live, book, self._copies, what)
        self._holding.staged = self._copies = None
        self._session.staging = ()
        with contextlib.suppress(TensorHubError):
            self._drain.begin()
        return version

    def discard(self, what: StagedVersion, deadline: Deadline) -> None:
        """Take the staged copy back and free the memory, unless something else has been staged meanwhile."""
        if what.sums is None or what is not self._current:
            return
        self.withdraw(deadline, "discard()")
        self._free()

    def leave(self, what: StagedVersion, deadline: Deadline) -> None:
        """Discard what was not installed; whoever still reads it at the deadline goes on elsewhere."""
        if what is not self._current or self._holding.staged is None:
            return
        try:
            self.discard(what, deadline)
        except TensorHubError as error:
            get_logger("client").warning("version %d was discarded while it had readers: %s", what.key[1], error)
            self._give_up()

    def let_go(self, deadline: Deadline) -> None:
        """Take the staged copy back as well as that goes until the deadline, before the worker leaves."""
        try:
            self.withdraw(deadline, "close()")
        except TensorHubError as error:
            get_logger("client").warning("closed while a staged version had readers: %s", error)

    def withdraw(self, deadline: Deadline, call: str) -> None:
        """Wait until nobody can read the staging memory; raises DeadlineExceeded."""
        if self._offered:
            checked(self._session.result(self._drain.begin()[0], deadline, call))

    def make_room(self, live: RegisteredMemory, deadline: Deadline) -> None:
        """Free staging memory that other registered memory has no use for."""
        room = self._resources.room
        if room.memory is not None and not room.fits(live):
            self.withdraw(deadline, "register()")
            self._free()

    def _withdrawn(self, done: Callable[[], None]) -> None:
        self._offered = False
        done()

    def _take_back(self, done: Callable[[BaseException | None], None]) -> None:
        future, _ = self._drain.begin()
        future.add_done_callback(lambda reply: done(error_of(reply.result())))

    def _give_up(self) -> None:
        with contextlib.suppress(TensorHubError):
            self._drain.begin()
        self._free()

    def _free(self) -> None:
        self._current = self._copies = self._holding.staged = None
        self._session.staging = ()
        try:
            self._resources.room.close()
        except Exception:
            get_logger("client").exception("the staging memory cannot be freed: reads into it may still be running")
