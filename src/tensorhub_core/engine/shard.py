"""One rank of an engine: fill its weights from peers, process them, offer them, and say truly what it holds.

What an engine rank does is the same for every engine; the adapter supplies its memory (`EngineMemory`). Every public
call answers with a `ShardReport`, never with an exception, because engines stop listening to the other ranks at the
first one that raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from tensorhub_core.client.staged import Staged
from tensorhub_core.client.versions import Version
from tensorhub_core.client.worker import Worker
from tensorhub_core.engine.fit import EngineMemory, Fit
from tensorhub_core.engine.logical import logical_tensors
from tensorhub_core.engine.staging import Fetch, Staging, Tensors, Waiting, Weights
from tensorhub_core.engine.steps import ShardReport
from tensorhub_core.errors import StateError, TensorHubError
from tensorhub_core.layout.types import Layout

Log = Callable[[str], None]
_LOG_EVERY_S = 5.0


@dataclass
class EngineShard:
    """Hold one rank's worker and its memory. One call at a time, from the thread that the engine runs its model on.

    `fit` says how the memory is described; `staging` fills what boxes cannot describe. `timeout_s`: of one update.
    `now` returns monotonic seconds.
    """

    memory: EngineMemory
    worker: Worker
    fit: Fit
    staging: Staging | None
    shard: int
    timeout_s: float
    log: Log
    now: Callable[[], float]
    _held: Version | None = field(default=None, init=False)
    _served: int | None = field(default=None, init=False)
    _offered: bool = field(default=False, init=False)
    _source: str | None = field(default=None, init=False)
    _digest: str = field(default="", init=False)
    _told_s: float = field(default=0.0, init=False)
    _fetch: Fetch | None = field(default=None, init=False)
    _released: bool = field(default=False, init=False)
    """The memory is not registered: it may be gone."""

    def register(self) -> None:
        """Register the memory as it is before processing; raises RegistrationError, ServerUnreachable."""
        self.fit.fill_padding()
        self._register(processed=False)

    def fill(self, version: int | Literal["latest"], timeout_s: float | None) -> None:
        """Fill the memory for the first time; raises what replicate() raises. Call `process` next."""
        self._take(version, timeout_s, first=True)

    def bootstrap(self, version: int) -> None:
        """Offer what the engine loaded by itself as a new version; raises VersionConflict. Call after processing."""
        if self.memory.in_place:
            self._register(processed=True)
        self._held = self.worker.publish(version)
        self._served, self._offered, self._source = version, True, "disk"
        self._note_digest()

    def update(self, version: int | Literal["latest"], timeout_s: float | None = None) -> ShardReport:
        """Bring the memory to a version together with the engine's other ranks."""
        try:
            if self._released:
                self.register()
            self._take(version, timeout_s or self.timeout_s, first=False)
        except Exception as error:
            self._recover()
            return self.report(error)
        return self.report()

    def stage(self, version: int | Literal["latest"], timeout_s: float | None = None) -> ShardReport:
        """Begin to fetch a version into host memory; the memory goes on to be served. Ask `staged` for the end."""
        patience_s = timeout_s or self.timeout_s
        try:
            if self.memory.in_place:
                raise StateError("weights that are processed in place cannot be staged: use staged = false")
            self.discard()
            if self._fetch is not None:
                raise StateError("another version is still being staged")
            self._fetch = Fetch(lambda fetch: self._wait_for(version, patience_s, fetch), patience_s)
        except Exception as error:
            return self.report(error)
        return self.report()

    def staged(self, wait_s: float = 0.0) -> ShardReport | None:
        """Wait up to `wait_s` for the end of `stage`: say which version waits now, None if it is still on its way.

        To be called often: it also judges tensors that the engine has not seen before, which needs the engine's thread.
        """
        fetch = self._fetch
        if fetch is None:
            return self.report(StateError("nothing was staged"))
        if not fetch.ended(wait_s):
            return None
        try:
            waiting = fetch.result()
        except Exception as error:
            self._fetch = None
            return self.report(error)
        return replace(self.report(), staged=waiting.version.key)

    def install(self, timeout_s: float | None = None) -> ShardReport:
        """Copy what is staged into the memory, together with the engine's other ranks; on failure it is dropped."""
        fetch, patience_s = self._fetch, timeout_s or self.timeout_s
        try:
            if fetch is None or not fetch.ended():
                raise StateError("nothing is staged")
            waiting = fetch.result()
            if isinstance(waiting, Tensors):
                self._load(waiting.version, waiting.digest, waiting.weights, patience_s)
                waiting.discard()
            else:
                assert isinstance(waiting, Staged)
                self._took(waiting.install(patience_s), offered=True)  # its memory serves the next stage
            self._source, self._fetch = fetch.source, None
        except Exception as error:
            self.discard()
            self._recover()
            return self.report(error)
        return self.report()

    def discard(self) -> ShardReport:
        """Drop what is staged, if anything."""
        fetch = self._fetch
        if fetch is not None:
            fetch.drop()
            if fetch.ended():
                self._fetch = None
        return self.report()

    def process(self) -> ShardReport:
        """Make the engine compute with what the memory holds."""
        held = self._held
        if held is None:
            return self.report(StateError("the memory is dirty: nothing may be processed"))
        self._served = None
        try:
            self.memory.process()
        except Exception as error:
            return self.report(error)
        self._served = int(held)
        return self.report()

    def publish(self) -> ShardReport:
        """Offer the memory if it is not offered yet."""
        try:
            self._offer()
        except Exception as error:
            return self.report(error)
        return self.report()

    def withdraw(self, timeout_s: float | None = None) -> ShardReport:
        """Take the copy back and let go of the memory, which may be released then; `update` registers and fills it."""
        try:
            self.discard()
            self._withdraw(timeout_s or self.timeout_s)
            self.worker.register({"released": torch.zeros(1, dtype=torch.uint8)}, tag="released")
            self._released, self._digest, self._source = True, "", None
        except Exception as error:
            return self.report(error)
        return self.report()

    def report(self, error: Exception | None = None) -> ShardReport:
        """Say what the memory holds and what the engine computes with."""
        return ShardReport(
            shard=self.shard,
            ok=error is None,
            version=None if self._held is None else int(self._held),
            epoch=0 if self._held is None else self._held.epoch,
            served=self._served,
            published=self._offered,
            source=self._source,
            digest=self._digest if self._held is not None else "",
            total_bytes=self.fit.total_bytes,
            code="" if error is None else error.code if isinstance(error, TensorHubError) else "error",
            message="" if error is None else str(error) or type(error).__name__,
            note=self.fit.note,
        )

    def close(self) -> None:
        """Take the copy back and leave, bounded; idempotent."""
        self._offered = False
        self.discard()
        self.worker.close()

    # --- how --------------------------------------------------------------------------------------------------------

    def _take(self, version: int | Literal["latest"], timeout_s: float | None, *, first: bool) -> None:
        if self.fit.streamed:
            self._take_streamed(version, timeout_s)
        elif self.memory.in_place:
            self._take_in_place(version, timeout_s, first=first)
        else:
            call = self.worker.replicate if first else self.worker.update
            self._took(call(version, timeout_s, self._progress, True, self._check), offered=True)

    def _took(self, got: Version, *, offered: bool) -> None:
        """Note a finished round; the engine computes with the old bytes until they are processed."""
        if self._held is None or got.key != self._held.key:
            self._served = None
            self._offered = offered
        self._held = got
        self._note_digest()

    def _take_in_place(self, version: int | Literal["latest"], timeout_s: float | None, *, first: bool) -> None:
        """Fill memory that processing rewrites: its raw form is never offered to anyone."""
        if not first:
            self.worker.unpublish(timeout_s)
            self._offered = False
            self._register(processed=False)
        got = self.worker.replicate(version, timeout_s, self._progress, False, self._check)
        self._held = None
        self._took(got, offered=False)

    def _take_streamed(self, version: int | Literal["latest"], timeout_s: float | None) -> None:
        """Fill through the engine's own loading, piece by piece; nothing is touched before some of it is there."""
        assert self.staging is not None
        have = None if self._held is None else self._held.key
        with self.staging.stream(version, timeout_s, have, self._progress) as stream:
            if stream.begins():
                self._withdraw(timeout_s)
                self._held, self._digest = stream.load(self.memory.load)

    def _load(self, got: Version, digest: str, weights: Weights, timeout_s: float | None) -> None:
        """Fill the memory by the engine's own loading, from a whole copy."""
        self._withdraw(timeout_s)
        self.memory.load(weights)
        self._held, self._digest = got, digest

    def _withdraw(self, timeout_s: float | None) -> None:
        """Take the copy back: from now on the memory holds nothing."""
        self.worker.unpublish(timeout_s)
        self._offered, self._held, self._served = False, None, None

    def _wait_for(self, version: int | Literal["latest"], timeout_s: float, fetch: Fetch) -> Waiting:
        """Fetch a version into host memory; on the fetching thread."""
        if self.staging is not None:
            return Tensors(self.staging, version, timeout_s, fetch.heard)
        return self.worker.stage(version, timeout_s, fetch.heard, lambda found: fetch.ask(lambda: self._check(found)))

    def _check(self, layouts: Sequence[Layout]) -> None:
        """Have the engine's own loading judge a version before a byte of it moves.

        Boxes alone do not tell that a tensor is larger than the part that is taken, or that a layer is left over.
        """
        if self.fit.tag:
            return
        self.fit.check(self.memory, logical_tensors(layouts))

    def _recover(self) -> None:
        """After a failed update, find out what the memory still holds, and offer it again if it is whole."""
        if self.fit.streamed:
            with contextlib.suppress(TensorHubError):
                self._offer()
            return
        if not self.memory.in_place:
            self._held = self.worker.version
        if self._held is None:
            self._served, self._offered, self._digest = None, False, ""
            return
        try:
            if self.memory.in_place:
                self._register(processed=True)
            self.worker.publish(int(self._held))
            self._offered = True
        except StateError:
            if self.memory.in_place:  # registered anew, a worker says only this way that its memory is dirty
                self._held, self._served = None, None
            self._offered = False
        except TensorHubError as error:
            self._offered = False
            self.log(f"version {self._held} is still here, but not offered to others: {error}")

    def _offer(self) -> None:
        if self._offered or self._held is None:
            return
        if self.memory.in_place and not self.fit.streamed:
            self._register(processed=True)
        self.worker.publish(int(self._held), fresh=self.fit.streamed)
        self._offered = True
        self._note_digest()

    def _register(self, *, processed: bool) -> None:
        self._released = False
        if processed:
            self.worker.register(self.fit.tensors, tag=f"processed:{self.memory.key}")
        else:
            self.worker.register(self.fit.tensors, self.fit.boxes, tag=self.fit.tag)

    def _note_digest(self) -> None:
        digest = self.worker.digest
        if digest is not None:
            self._digest = digest.hex()

    def _progress(self, done_bytes: int, total_bytes: int, source: str) -> None:
        self._source = source
        now = self.now()
        if now - self._told_s >= _LOG_EVERY_S and done_bytes < total_bytes:
            self._told_s = now
            self.log(f"{done_bytes / max(1, total_bytes):.0%} of {total_bytes:,} bytes from {source}")
