"""The worker's handle: arguments are checked and state is kept here, rounds are decided in `machine`."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tensorhub_core.client.access import SourceBook
from tensorhub_core.client.drain import error_of
from tensorhub_core.client.holding import Holding
from tensorhub_core.client.identity import Identity, checked
from tensorhub_core.client.leaving import Leaving
from tensorhub_core.client.mailbox import Mailbox
from tensorhub_core.client.memory import RegisteredMemory
from tensorhub_core.client.mirror import blank_memory
from tensorhub_core.client.progress import CheckCallback, ProgressCallback
from tensorhub_core.client.resources import Resources
from tensorhub_core.client.rounds import Mode
from tensorhub_core.client.runner import Call, RoundRunner, StagedVersion
from tensorhub_core.client.staged import Staged, StagedEnds, Stager
from tensorhub_core.client.sums import pack_sums
from tensorhub_core.client.tensors import Tensors
from tensorhub_core.client.turns import Turns
from tensorhub_core.client.versions import Version, VersionInfo, number_of, wanted
from tensorhub_core.client.waiting import wait_for
from tensorhub_core.clock import Deadline
from tensorhub_core.config import ClientConfig
from tensorhub_core.errors import DeadlineExceeded, ServerUnreachable, StateError, TensorHubError
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.canonical import digest_of
from tensorhub_core.layout.types import Box, Layout
from tensorhub_core.observe.counters import WorkerCounters
from tensorhub_core.state.messages import (
    ListVersions,
    Publish,
    Published,
    PutBlob,
    Unpublish,
    Versions,
)

if TYPE_CHECKING:
    from typing_extensions import Self


class Worker:
    """One shard of a replica, connected to the reference server; made by `connect()`.

    `register`, `publish`, `unpublish`, `replicate`, `update`, `stage` and the methods of what it returns belong to one
    thread at a time (a second one gets `StateError`); `wait`, `versions`, `version` and `close` may be called from any.
    """

    def __init__(self, identity: Identity, config: ClientConfig, resources: Resources, mailbox: Mailbox) -> None:
        """Take over an open session; `connect()` does this."""
        self.counters: WorkerCounters = mailbox.counters
        self._identity, self._config = identity, config
        self._resources, self._session, self._mailbox = resources, resources.session, mailbox
        mailbox.resources = resources
        self._holding = Holding()
        self._book: SourceBook | None = None
        self._runner = RoundRunner(resources, mailbox, self._holding, config)
        self._stager = Stager(self._runner, resources, self._holding, config.staging_bytes)
        self._leaving = Leaving(identity, resources, self._holding, self._stager, self._runner)
        self._turns = Turns()
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
        return None if self.version is None else self._holding.digest

    # --- holding ----------------------------------------------------------------------------------------------------

    def register(self, tensors: Tensors, boxes: Mapping[str, Sequence[Box]] | None = None, *, tag: str = "") -> None:
        """Register the worker's tensors: their memory is pinned and filled or read in place from now on.

        `tensors`: a mapping or an iterable of (name, tensor), torch (CPU, CUDA) or numpy; kept alive until `close()`.
        `boxes`: where regions of logical tensors lie in these; without, each tensor is the logical one of its name. Let
        what they leave out be alike at all replicas: equal layouts copy and compare it. A `tag` says that only an equal
        layout can read the bytes. Raises RegistrationError naming the tensor, StateError while a version is published.
        """
        with self._exclusively("register"):
            self._stager.discard_lost(self._deadline(None), "register()")
            self._holding.check_register()
            memory = RegisteredMemory(
                tensors,
                boxes,
                shard=self._identity.shard,
                num_shards=self._identity.num_shards,
                tag=tag,
                segment_bytes=self._config.segment_bytes,
            )
            self._exchange(memory)

    def mirror(self, layout: Layout) -> None:
        """Register fresh host memory of another worker's layout, to be filled from whoever holds it, bit for bit.

        `layout` is that of this worker's own shard. Raises ConfigError if there is not enough memory, LayoutMismatch if
        it is another shard's, StateError while a version is published.
        """
        with self._exclusively("register"):
            self._stager.discard_lost(self._deadline(None), "register()")
            self._holding.check_register()
            self._exchange(blank_memory(layout, self._identity.shard, self._identity.num_shards))

    def publish(self, version: int, *, fresh: bool = False) -> Version:
        """Commit not to change the registered memory, which holds `version`: readable by everyone from now on.

        Publishing it again changes nothing. `fresh=True`: every tensor was rewritten after a broken replicate. Raises
        StateError, VersionConflict (the number is taken or too old), RegistrationError (a tensor was moved),
        ConfigError (the version will be retained, and `offload_limit_bytes` has no room for a copy of it).
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
            held_epoch, converted = self._holding.origin_of(number, fresh)
            offer = Publish(number, sums.digest, held_epoch, self._resources.offloads.room_bytes(), converted)
            try:
                reply = self._session.request(offer, deadline)
            except BaseException as error:
                if not isinstance(error, TensorHubError) or isinstance(error, DeadlineExceeded | ServerUnreachable):
                    self._runner.take_back_uncertain((number, sums))
                raise
            assert isinstance(reply, Published)
            if held_epoch is None:
                self._session.created = (reply.epoch, reply.number)
            self._holding.now_published((reply.epoch, reply.number))
            self._holding.digest = sums.digest
            self._resources.stand((reply.epoch, reply.number), sums, life, converted)
            self.counters.published += 1
            return Version(reply.number, reply.epoch)

    def unpublish(self, timeout_s: float | None = None) -> None:
        """Take the copy back; returns when no reader can see the memory any more, at once if nothing is published.

        Where this replica is the last reliable holder of a retained version, that is first copied into host memory.
        Raises DeadlineExceeded after `timeout_s` (None = the setting `call_timeout_s`): the copy stays draining, no new
        reader comes, and calling again goes on waiting. Raises ConfigError or StateError if there is no room for the
        copy that has to be made: then the version stays published, and calling again tries again.
        """
        with self._exclusively("unpublish"):
            if self._holding.held is None and not self._holding.published:
                return
            future, begun = self._runner.drain.begin()
            self.counters.drains += int(begun)
            self._holding.now_draining()
            reply = self._session.result(future, self._deadline(timeout_s), "unpublish()")
            if error_of(reply) is not None:
                self._holding.now_refused()
            checked(reply)
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
            return self._runner.fill(*self._call("replicate", want, timeout_s, progress, publish, check))

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
            return self._runner.fill(*self._call("update", want, timeout_s, progress, publish, check))

    def stage(
        self,
        version: int | str = "latest",
        timeout_s: float | None = None,
        progress: ProgressCallback | None = None,
        check: CheckCallback | None = None,
    ) -> Staged:
        """Fetch a version into host memory while the registered memory serves on; return it, ready to `install()`.

        All shards of the replica stage together and get the same version. Nothing is fetched if the memory holds the
        version already. The memory is allocated by the first stage and kept for later ones until `discard()`. Arguments
        and errors as for `replicate`, but that the registered memory is never touched; and StateError while another
        version is staged, or if the setting `staging_bytes` does not allow as much as the shard has.
        """
        want = wanted(version)
        with self._exclusively("stage", unmoved=True):
            self._stager.discard_lost(self._deadline(timeout_s), "stage()")
            self._holding.check_stage()
            call, memory, book = self._call("stage", want, timeout_s, progress, check=check)
            what, digest = self._stager.stage(call, memory, book)
            ends = StagedEnds(self._install, self._discard, self._leave_staged)
            return self._stager.handed_out(Staged(what, memory.total_bytes, digest, ends))

    def wait(self, newer_than: int | None = None, timeout_s: float | None = None) -> Version:
        """Wait until a whole version newer than `newer_than` is available (None: any) and return it; moves nothing.

        A plain integer counts in the current stream epoch. Raises DeadlineExceeded after `timeout_s`.
        """
        self._check_open()
        return wait_for(self._session, self._key_of(newer_than), self._deadline(timeout_s))

    def versions(self) -> list[VersionInfo]:
        """List the versions of the model that the server knows, oldest first."""
        self._check_open()
        reply = self._session.request(ListVersions(), self._deadline(None))
        assert isinstance(reply, Versions)
        rows = sorted(reply.rows, key=lambda row: (row.epoch, row.number))
        return [VersionInfo(Version(r.number, r.epoch), r.whole, r.retained, r.replicas, r.total_bytes) for r in rows]

    def hand_over(self, timeout_s: float | None = None) -> None:
        """Wait until no retained version depends on this replica, which is about to leave; `close()` does it too.

        Nobody relies on it from now on. Raises DeadlineExceeded after `timeout_s` (None = the setting `handover_s`),
        VersionUnavailable if there is nobody to hand over to.
        """
        with self._exclusively("hand_over"):
            self._leaving.hand_over(self._deadline(self._config.handover_s if timeout_s is None else timeout_s))

    def close(self) -> None:
        """Hand over what is retained here, take the copy back, and leave; idempotent, bounded.

        Others get `handover_s` to become holders, after which a warning names what they did not take over; readers of
        the copy get `close_timeout_s`. In a signal handler that has interrupted a call of this worker it returns at
        once: the call ends with StateError, and then the worker, on a thread that the interpreter waits for.
        """
        self._close(hurry=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(hurry=kind is not None)

    # --- how --------------------------------------------------------------------------------------------------------

    def _exchange(self, memory: RegisteredMemory) -> None:
        deadline = self._deadline(None)
        if self._holding.held is not None:
            # The server knows a copy that is held back: other memory must not pass for it.
            self._session.request(Unpublish(), deadline)
        self._stager.make_room(memory, deadline)
        self._holding.registered, self._holding.held = False, None
        self._serve(memory, deadline)
        self._holding.now_registered()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline.after(self._config.call_timeout_s if timeout_s is None else timeout_s, time.monotonic())

    def _close_s(self, hurry: bool) -> float:
        """Return how long an end waits for readers; after an error no longer than a lease."""
        patience_s = self._config.close_timeout_s
        return min(self._mailbox.newest()[0].lease_s, patience_s) if hurry else patience_s

    def _check_open(self) -> None:
        self._session.check_alive()
        if self._closed or self._runner.lost:
            raise StateError("the worker is closed: connect() again")

    @contextlib.contextmanager
    def _exclusively(self, what: str, *, unmoved: bool = False) -> Iterator[None]:
        """Hold the worker's memory for one call; with `unmoved`, make sure that it still is what was registered."""
        self._check_open()
        with self._turns.take(what):
            self._check_open()
            if unmoved and self._resources.memory is not None:
                self._resources.memory.check_unmoved()
            yield

    def _serve(self, memory: RegisteredMemory, deadline: Deadline) -> None:
        self._resources.serve(memory, deadline)
        if self._book is None:
            self._book = SourceBook(self._session.request, self._resources.transport.name, self._identity.cast)
        self._book.know(memory.fingerprint, memory.layout, memory.table)

    def _served_memory(self, deadline: Deadline) -> RegisteredMemory:
        """Return the registered memory, made sure to be served."""
        memory = self._resources.memory
        assert memory is not None
        if not self._resources.serving:
            self._serve(memory, deadline)
        return memory

    def _call(
        self,
        mode: Mode,
        want: int | None,
        timeout_s: float | None,
        progress: ProgressCallback | None = None,
        offer: bool = True,
        check: CheckCallback | None = None,
    ) -> tuple[Call, RegisteredMemory, SourceBook]:
        """Return what a round needs, after the registered memory was made sure to be served and writable."""
        deadline = self._deadline(timeout_s)
        memory = self._served_memory(deadline)
        memory.check_writable()
        assert self._book is not None
        return Call(mode, want, deadline, progress, offer, check), memory, self._book

    def _install(self, what: StagedVersion, timeout_s: float | None, offer: bool) -> Version:
        with self._exclusively("install", unmoved=True):
            return self._stager.install(what, *self._call("install", None, timeout_s, offer=offer))

    def _discard(self, what: StagedVersion, timeout_s: float | None) -> None:
        if not self._closed:
            with self._exclusively("discard"):
                self._stager.discard(what, self._deadline(timeout_s))

    def _leave_staged(self, what: StagedVersion, hurry: bool) -> None:
        with contextlib.suppress(StateError), self._exclusively("discard"):
            self._stager.leave(what, self._deadline(self._close_s(hurry)))

    def _key_of(self, version: int | None) -> VersionKey | None:
        if version is None:
            return None
        if isinstance(version, Version):
            return version.key
        high = self._session.high
        epoch = self._mailbox.newest()[0].stream_epoch
        return (epoch if high is None else max(epoch, high[0]), number_of(version))

    def _close(self, hurry: bool) -> None:
        if self._closed and not self._finalizer.alive:
            return
        if os.getpid() != self._session.pid:
            self._closed = True
            self._finalizer.detach()
            return
        self._closed = True
        self._mailbox.interrupt(StateError("the worker was closed"))
        self._turns.last(lambda: self._end(hurry))

    def _end(self, hurry: bool) -> None:
        try:
            if self._session.answers() and self._mailbox.over is None:
                drain_s, handover_s = self._close_s(hurry), self._config.handover_s
                self._leaving.leave(min(handover_s, drain_s) if hurry else handover_s, drain_s)
        finally:
            self._finalizer()
