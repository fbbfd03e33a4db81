"""The worker's handle: arguments are checked and state is kept here, rounds are decided in `machine`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING

from tensorhub_core.client.access import SourceBook
from tensorhub_core.client.drain import Drain, error_of
from tensorhub_core.client.driver import CheckCallback, ProgressCallback, RoundDriver, RoundParts
from tensorhub_core.client.holding import Holding
from tensorhub_core.client.identity import Identity, checked
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.rounds import End, Mode, RoundState
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.client.tensors import Tensors
from tensorhub_core.client.versions import Version, VersionInfo, number_of, wanted
from tensorhub_core.clock import Deadline
from tensorhub_core.config import ClientConfig
from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, StateError, TensorHubError
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.layout.types import Box
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.observe.log import get_logger
from tensorhub_core.state.messages import (
    Available,
    Cancel,
    ListVersions,
    Publish,
    Published,
    PutBlob,
    Reply,
    Unpublish,
    Versions,
    Wait,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_LEAVE_S = 1.0
_CLOSE_BUSY_S = 35.0


class Worker:
    """One shard of a replica, connected to the reference server; made by `connect()`.

    `register`, `publish`, `unpublish`, `replicate` and `update` belong to one thread at a time (a second one gets
    `StateError`); `wait`, `versions`, `version` and `close` may be called from any.
    """

    def __init__(self, identity: Identity, config: ClientConfig, resources: Resources, mailbox: Mailbox) -> None:
        """Take over an open session; `connect()` does this."""
        self.counters: WorkerCounters = mailbox.counters
        self._identity, self._config = identity, config
        self._resources, self._session, self._mailbox = resources, resources.session, mailbox
        self._holding = Holding()
        self._digest: bytes | None = None
        self._book: SourceBook | None = None
        self._drain = Drain(self._session.submit, self._session.offer_nothing)
        self._next_round = (0, 0)
        self._lock = threading.Lock()
        self._running = ""
        self._closed = False
        self._finalizer = weakref.finalize(self, resources.close)

    @property
    def model(self) -> str:
        """Return the model's name."""
        return self._identity.model

    @property
    def replica(self) -> str:
        """Return the replica's name."""
        return self._identity.replica

    @property
    def version(self) -> Version | None:
        """Return the version that the registered memory holds, None if it holds none or is dirty."""
        held = self._holding.held
        return None if held is None or self._holding.dirty else Version.of(held)

    @property
    def digest(self) -> bytes | None:
        """Return the xxh3_128 of the verified checksums of what the memory holds, None if it holds no version."""
        return None if self.version is None else self._digest

    # --- holding ----------------------------------------------------------------------------------------------------

    def register(self, tensors: Tensors, boxes: Mapping[str, Sequence[Box]] | None = None, *, tag: str = "") -> None:
        """Register the worker's tensors: their memory is pinned and filled or read in place from now on.

        `tensors`: a mapping or an iterable of (name, tensor), torch (CPU, CUDA) or numpy; kept alive until `close()`.
        `boxes`: where regions of logical tensors lie in these; without, each tensor is the logical one of its name. A
        `tag` says that the bytes are in a processed form that only an equal layout can read. Raises RegistrationError
        naming the tensor, StateError while a version is published.
        """
        with self._exclusively("register"):
            self._holding.check_register()
            memory = RegisteredMemory(
                tensors,
                boxes,
                shard=self._identity.shard,
                num_shards=self._identity.num_shards,
                tag=tag,
                segment_bytes=self._config.segment_bytes,
            )
            deadline = self._deadline(None)
            if self._holding.held is not None:
                # The server knows a copy that is held back: other memory must not pass for it.
                self._session.request(Unpublish(), deadline)
            self._holding.registered, self._holding.held = False, None
            self._serve(memory, deadline)
            self._holding.now_registered()

    def publish(self, version: int, *, fresh: bool = False) -> Version:
        """Commit not to change the registered memory, which holds `version`: readable by everyone from now on.

        Publishing it again changes nothing. `fresh=True`: every tensor was rewritten after a broken replicate. Raises
        StateError, VersionConflict (the number is taken or too old), RegistrationError (a tensor was moved).
        """
        number = number_of(version)
        with self._exclusively("publish", unmoved=True):
            if not self._holding.check_publish(number, fresh):
                assert self._holding.held is not None
                return Version.of(self._holding.held)
            deadline = self._deadline(None)
            memory = self._served_memory(deadline)
            memory.collect()
            blob = pack_sums(memory.sums())
            sums, life = PutBlob(digest_of(blob), blob), self._session.hellos
            self._session.request(sums, deadline)
            held_epoch = self._holding.held_epoch(number, fresh)
            try:
                reply = self._session.request(Publish(number, sums.digest, held_epoch), deadline)
            except BaseException as error:
                if not isinstance(error, TensorHubError) or isinstance(error, DeadlineExceeded | ServerUnreachable):
                    self._take_back_uncertain()
                raise
            assert isinstance(reply, Published)
            self._holding.now_published((reply.epoch, reply.number))
            self._digest = sums.digest
            self._resources.stand((reply.epoch, reply.number), sums, life)
            self.counters.published += 1
            return Version(reply.number, reply.epoch)

    def unpublish(self, timeout_s: float | None = None) -> None:
        """Take the copy back; returns when no reader can see the memory any more, at once if nothing is published.

        Raises DeadlineExceeded after `timeout_s` (None = the setting `call_timeout_s`): the copy stays draining, no new
        reader comes, and calling again goes on waiting.
        """
        with self._exclusively("unpublish"):
            if self._holding.held is None and not self._holding.published:
                return
            future, begun = self._drain.begin()
            self.counters.drains += int(begun)
            self._holding.now_draining()
            checked(self._session.result(future, self._deadline(timeout_s), "unpublish()"))
            self._holding.now_withdrawn(keep=False)

    # --- reading ----------------------------------------------------------------------------------------------------

    def replicate(
        self,
        version: int | str = "latest",
        timeout_s: float | None = None,
        progress: ProgressCallback | None = None,
        publish: bool = True,
        check: CheckCallback | None = None,
    ) -> Version:
        """Fill the registered memory with a version from peers and become a holder of it; return the version.

        Waits for the version to exist. `progress(done_bytes, total_bytes, source_replica)` is called from the executor
        thread at most ten times a second. `publish=False`: neither the copy nor a part of it is offered to anyone.
        `check(layouts)` may refuse sources of other layouts by raising LayoutMismatch, before anything is withdrawn.
        Raises LayoutMismatch before a byte is written, VersionUnavailable, CorruptTransfer, DeadlineExceeded after
        `timeout_s`; if the memory was touched by then, it is dirty and `version` None.
        """
        want = wanted(version)
        with self._exclusively("replicate", unmoved=True):
            self._holding.check_replicate()
            return self._round("replicate", want, timeout_s, progress, publish, check)

    def update(
        self,
        version: int | str = "latest",
        timeout_s: float | None = None,
        progress: ProgressCallback | None = None,
        publish: bool = True,
        check: CheckCallback | None = None,
    ) -> Version:
        """Replace what the memory holds by a version if it is another one; return the version held then.

        From any state. The old copy is withdrawn only when the new version is promised and can be read; it stays
        published if not. Arguments and errors as for `replicate`.
        """
        want = wanted(version)
        with self._exclusively("update", unmoved=True):
            self._holding.check_update()
            return self._round("update", want, timeout_s, progress, publish, check)

    def wait(self, newer_than: int | None = None, timeout_s: float | None = None) -> Version:
        """Wait until a whole version newer than `newer_than` is available (None: any) and return it; moves nothing.

        A plain integer counts in the current stream epoch. Raises DeadlineExceeded after `timeout_s`.
        """
        self._check_open()
        deadline = self._deadline(timeout_s)
        future: Future[Reply] = Future()
        number = self._session.submit(Wait(self._key_of(newer_than)), future.set_result)
        try:
            reply = checked(self._session.result(future, deadline, "wait()"))
        except BaseException:
            self._session.forget(number)
            with contextlib.suppress(TensorHubError):
                self._session.submit(Cancel(number), lambda _: None)
            raise
        assert isinstance(reply, Available)
        return Version(reply.number, reply.epoch)

    def versions(self) -> list[VersionInfo]:
        """List the versions of the model that the server knows, oldest first."""
        self._check_open()
        reply = self._session.request(ListVersions(), self._deadline(None))
        assert isinstance(reply, Versions)
        rows = sorted(reply.rows, key=lambda row: (row.epoch, row.number))
        return [VersionInfo(Version(r.number, r.epoch), r.whole, r.retained, r.replicas, r.total_bytes) for r in rows]

    def close(self) -> None:
        """Take the copy back, waiting up to `close_timeout_s` for its readers, and leave; idempotent, bounded."""
        self._close(self._config.close_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease_s = self._mailbox.newest()[0].lease_s
        self._close(self._config.close_timeout_s if kind is None else min(lease_s, self._config.close_timeout_s))

    # --- how --------------------------------------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._config.call_timeout_s if timeout_s is None else timeout_s, time.monotonic())

    def _check_open(self) -> None:
        self._session.check_alive()
        if self._closed:
            raise StateError("the worker is closed: connect() again")

    @contextlib.contextmanager
    def _exclusively(self, what: str, *, unmoved: bool = False) -> Iterator[None]:
        """Hold the worker's memory for one call; with `unmoved`, make sure that it still is what was registered."""
        self._check_open()
        if not self._lock.acquire(blocking=False):
            raise StateError(f"{what}() was called while {self._running}() runs in another thread")
        try:
            self._running = what
            self._check_open()
            if unmoved and self._resources.memory is not None:
                self._resources.memory.check_unmoved()
            yield
        finally:
            self._lock.release()

    def _serve(self, memory: RegisteredMemory, deadline: Deadline) -> None:
        self._resources.serve(memory, deadline)
        if self._book is None:
            self._book = SourceBook(self._session.request, self._resources.transport.name)
        self._book.know(memory.fingerprint, memory.layout, memory.table)

    def _served_memory(self, deadline: Deadline) -> RegisteredMemory:
        """Return the registered memory, made sure to be served."""
        memory = self._resources.memory
        assert memory is not None
        if not self._resources.serving:
            self._serve(memory, deadline)
        return memory

    def _round(
        self,
        mode: Mode,
        want: int | None,
        timeout_s: float | None,
        progress: ProgressCallback | None,
        offer: bool,
        check: CheckCallback | None,
    ) -> Version:
        deadline, holding = self._deadline(timeout_s), self._holding
        memory = self._served_memory(deadline)
        memory.check_writable()
        assert self._book is not None
        welcome, life = self._mailbox.newest()
        number = self._next_round[1] if self._next_round[0] == life else welcome.next_round
        have = None if holding.dirty else holding.held
        state = RoundState(number, want, mode, have, offer, deadline.at_s, holding.published or holding.draining)
        executor = self._resources.executor
        parts = RoundParts(self._session, memory, self._book, executor, self._withdraw, self.counters, check)
        driver = RoundDriver(state, parts, life, deadline, progress)
        self._mailbox.attach(driver)
        try:
            end = driver.run()
        finally:
            self._mailbox.detach()
            self._next_round = (driver.life, state.number + 1)
        if not state.published and (holding.published or holding.draining):
            holding.now_withdrawn(keep=True)
        return self._conclude(state, driver, end)

    def _withdraw(self, done: Callable[[BaseException | None], None]) -> None:
        future, begun = self._drain.begin()
        self.counters.drains += int(begun)
        self._holding.now_draining()
        future.add_done_callback(lambda reply: done(error_of(reply.result())))

    def _conclude(self, state: RoundState, driver: RoundDriver, end: End) -> Version:
        """Note how a round ended; return the version or raise its error."""
        holding = self._holding
        self.counters.discards += state.discards
        if end.error is None:
            assert end.key is not None
            if end.held and holding.held != end.key:
                raise StateError(f"the server takes the memory for version {end.key[1]}: call unpublish(), then again")
            if not end.held:
                holding.now_committed(end.key, end.published)
                self.counters.commits += 1
                self._digest = None if driver.sums is None else driver.sums.digest
                if end.published and driver.sums is not None:
                    self._resources.stand(end.key, driver.sums, driver.life)
            return Version.of(end.key)
        self.counters.aborted_rounds += 1
        if end.dirty:
            holding.now_spoiled()
        if end.uncertain:
            self._take_back_uncertain()
        if end.unquiet:
            self._closed = True
            self._session.close()
        elif state.key is None and isinstance(end.error, StateError):
            self._session.say_hello_again()  # the server's count of rounds may be another one than ours
        if isinstance(end.error, DeadlineExceeded) and not self._session.answers():
            raise ServerUnreachable(f"{end.error}; {self._session.address} is silent") from end.error
        raise end.error

    def _take_back_uncertain(self) -> None:
        """Take back what the server may take for published, and let nobody read it meanwhile."""
        self._holding.published = True
        self._holding.now_draining()
        with contextlib.suppress(TensorHubError):
            self._drain.begin()
        self._resources.hide()

    def _key_of(self, version: int | None) -> VersionKey | None:
        if version is None:
            return None
        if isinstance(version, Version):
            return version.key
        high = self._session.high
        epoch = self._mailbox.newest()[0].stream_epoch
        return (epoch if high is None else max(epoch, high[0]), number_of(version))

    def _close(self, drain_s: float) -> None:
        if self._closed and not self._finalizer.alive:
            return
        if os.getpid() != self._session.pid:
            self._closed = True
            self._finalizer.detach()
            return
        self._closed = True
        self._mailbox.interrupt(StateError("the worker was closed"))
        acquired = self._lock.acquire(timeout=_CLOSE_BUSY_S)
        try:
            self._drain_and_leave(drain_s)
        finally:
            self._finalizer()
            if acquired:
                self._lock.release()

    def _drain_and_leave(self, drain_s: float) -> None:
        session = self._session
        if not session.answers() or self._mailbox.over is not None:
            return
        if self._holding.published:
            try:
                session.result(self._drain.begin()[0], Deadline.after(drain_s, time.monotonic()), "unpublish()")
            except TensorHubError as error:
                get_logger("client").warning("closed while version %s had readers: %s", self.version, error)
        session.leave(_LEAVE_S)
