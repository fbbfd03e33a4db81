"""Bring versions into host memory for an engine: in pieces for its own loading, or whole for a later install."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from tensorhub_core.client.awaiting import Bell
from tensorhub_core.client.piecewise_round import PassingVersion, PieceReader
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.client.versions import Version
from tensorhub_core.engine.logical import LogicalTensor, logical_tensors
from tensorhub_core.errors import DeadlineExceeded, StateError, TensorHubError
from tensorhub_core.ids import VersionKey
from tensorhub_core.layout.match import listing
from tensorhub_core.layout.types import Layout
from tensorhub_core.limits import start_thread

Weights = list[tuple[str, torch.Tensor]]


Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Staging:
    """Connect a second worker for each fill; all ranks of an engine fill in one round, so that they get one version."""

    connect: Callable[[], PieceReader]
    sources: Sequence[LogicalTensor]

    @contextmanager
    def stream(
        self, version: int | Literal["latest"], timeout_s: float | None, have: VersionKey | None, progress: Progress
    ) -> Iterator[Stream]:
        """Read a version in pieces of bounded memory, for as long as the block lasts; `have` is what it is to replace.

        What the block raises breaks the round for all ranks.
        """
        tensors = [(source.name, source.dtype, source.shape) for source in self.sources]
        with (
            self.connect() as worker,
            worker.passing(tensors, version, timeout_s, progress, have=have, check=self._check) as passing,
        ):
            yield Stream(passing)

    def _check(self, layouts: Sequence[Layout]) -> None:
        """Refuse a version with tensors that the engine has not seen when it judged how it is loaded."""
        known = {source.name for source in self.sources}
        extra = [source.name for source in logical_tensors(layouts) if source.name not in known]
        if extra:
            differences = [f"extra: the version has {name!r}, the engine was started without it" for name in extra]
            raise listing("the version does not fit this engine", differences)

    @contextmanager
    def replicate(
        self, version: int | Literal["latest"], timeout_s: float | None, progress: Progress
    ) -> Iterator[tuple[Version, str, Weights]]:
        """Fetch all of a version into host memory; yield it, the digest of its bytes and (name, tensor) pairs.

        The memory is given back at the end of the block. Raises what replicate() raises.
        """
        with self.connect() as worker:
            weights = [
                (source.name, torch.empty(source.shape, dtype=getattr(torch, source.dtype))) for source in self.sources
            ]
            worker.register(weights)
            got = worker.replicate(version, timeout_s, progress, publish=False)
            digest = worker.digest
            yield got, "" if digest is None else digest.hex(), weights


class Stream:
    """A version on its way through bounded memory; belongs to the engine's loading thread."""

    def __init__(self, passing: PassingVersion) -> None:
        self._passing = passing

    def begins(self) -> bool:
        """Wait for the first piece; False: every rank has the version already. Raises why it cannot be had."""
        return self._passing.begins()

    def load(self, load: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> tuple[Version, str]:
        """Have `load` take all (name, tensor) pairs as it asks for them; it may keep the tensors.

        Returns the version and the digest of its bytes once every rank is known to have got it. Raises what broke the
        round, or what `load` raised: the engine's memory then holds a part of it.
        """
        version, digest = self._passing.use(lambda tensors: load((raw.name, _copied(raw)) for raw in tensors))
        return version, digest.hex()


def _copied(raw: RawTensor) -> torch.Tensor:
    """Return a tensor of its own: engines' loaders keep some until others have come."""
    return torch.from_numpy(raw.buffer.copy()).view(getattr(torch, raw.dtype)).reshape(raw.shape)


class Waiting(Protocol):
    """A version that waits in host memory."""

    @property
    def version(self) -> Version:
        """Return which one."""

    def discard(self) -> None:
        """Give its memory back; idempotent."""


class Tensors:
    """A version that waits as the source's own tensors, for an engine whose loading computes what it stores."""

    def __init__(
        self,
        staging: Staging,
        version: int | Literal["latest"],
        timeout_s: float | None,
        progress: Progress,
    ) -> None:
        """Fetch it; raises what replicate() raises."""
        with contextlib.ExitStack() as stack:
            fetched = staging.replicate(version, timeout_s, progress)
            self.version, self.digest, self.weights = stack.enter_context(fetched)
            self._held = stack.pop_all()

    def discard(self) -> None:
        """Give the memory back."""
        self.weights = []
        self._held.close()


class Fetch:
    """One version on its way into host memory, on a thread of its own: the engine's own thread goes on computing."""

    def __init__(self, fetch: Callable[[Fetch], Waiting], patience_s: float) -> None:
        """Begin: `fetch(self)` returns what then waits, or raises; it may `ask` the engine's thread something."""
        self.source: str | None = None
        self._fetch, self._patience_s = fetch, patience_s
        self._lock = threading.RLock()  # entered in one step: no interruption leaves it held
        self._changed = threading.Condition(self._lock)
        self._asked = Bell()
        """Rung for the engine's thread."""
        self._question: Callable[[], None] | None = None
        self._answers: list[Exception | None] = []
        self._found: Waiting | None = None
        self._error: Exception | None = None
        self._dropped = self._over = False
        start_thread(threading.Thread(target=self._run, name="tensorhub-stage", daemon=True))

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` for the end and tell whether it has come; the engine's thread answers what is asked.

        Never waits long while a question is there.
        """
        self._asked.wait_for(lambda: self._over or self._question is not None, timeout_s)
        with self._lock:
            question, self._question = self._question, None
        if question is not None:
            answer = None
            try:
                question()
            except Exception as error:
                answer = error
            with self._lock:
                self._answers.append(answer)
                self._changed.notify_all()
        return self._over

    def ask(self, question: Callable[[], None]) -> None:
        """Have the engine's thread run `question`, at its next look at this; raises what it raised. Fetching thread."""
        with self._lock:
            self._question = question
            self._asked.ring()
            if not self._changed.wait_for(lambda: self._answers or self._dropped, self._patience_s) or self._dropped:
                self._question = None
                raise DeadlineExceeded("the engine's thread did not look at what is staged in time")
            answer = self._answers.pop()
        if answer is not None:
            raise answer

    def result(self) -> Waiting:
        """Return what waits; raises why nothing does. Only once it has ended."""
        if self._error is not None:
            raise self._error
        if self._found is None:
            raise StateError("what was staged has been dropped")
        return self._found

    def drop(self) -> None:
        """Give the memory back, at once or as soon as the fetch has ended."""
        with self._lock:
            self._dropped = True
            found, self._found = self._found, None
            self._changed.notify_all()
        _discard(found)

    def heard(self, done_bytes: int, total_bytes: int, source: str) -> None:
        """Note who the bytes come from; a progress callback."""
        self.source = source

    def _run(self) -> None:
        found: Waiting | None = None
        try:
            found = self._fetch(self)
        except Exception as error:
            self._error = error
        with self._lock:
            if not self._dropped:
                self._found, found = found, None
            self._over = True
        self._asked.ring()
        _discard(found)


def _discard(waiting: Waiting | None) -> None:
    if waiting is not None:
        with contextlib.suppress(TensorHubError):
            waiting.discard()
