"""Publish one set of weights between the steps that change it, on all ranks of a trainer alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

from tensorhub_core.errors import ConfigError, DeadlineExceeded, RegistrationError, ServerUnreachable, StateError
from tensorhub_core.layout.types import Box
from tensorhub_core.observe.log import get_logger
from tensorhub_megatron.agreement import Agreement, Alone


class PublishingWorker(Protocol):
    """What a `Publication` needs of a `tensorhub_core` worker."""

    def register(self, tensors: Any, boxes: Any = None) -> None:
        """Say which memory is published from now on."""

    def publish(self, version: int) -> Any:
        """Make the registered memory readable as `version`."""

    def unpublish(self, timeout_s: float | None = None) -> Any:
        """Return when no reader can see the memory any more."""

    def close(self) -> None:
        """Leave."""


REPORT_S = 30.0
"""How often a wait for readers is logged."""


@dataclass(frozen=True)
class Registration:
    """What a rank registers: tensors by physical name, and where they lie in logical ones (None: they are those)."""

    tensors: Mapping[str, Any]
    boxes: Mapping[str, Sequence[Box]] | None = None


class Weights(Protocol):
    """Memory of one rank that holds its part of the weights."""

    def refresh(self) -> None:
        """Make the memory hold what the last step made; called by all ranks, while nothing is published."""

    def describe(self) -> Registration:
        """Return what to register; raises RegistrationError for what cannot be."""

    def moved(self) -> bool:
        """Tell whether what `describe` returned last is no longer where the weights are."""


class Publication:
    """The versions of one set of weights; its methods are called by all ranks, each from its training thread.

    What fails on one rank is raised on all of them, so that none steps while another has readers, and none goes on
    while another could not publish.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        start_version: int = 0,
        every: int = 1,
        timeout_s: float | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """Check the numbers; nothing is published before `open()`. Raises ConfigError for impossible ones."""
        start_version, self._every = whole_number("start_version", start_version, 0), whole_number("every", every, 1)
        if timeout_s is not None and not timeout_s >= 0:
            raise ConfigError(f"timeout_s = {timeout_s} must be at least 0")
        self._weights = weights
        self._timeout_s = timeout_s
        self._agreement: Agreement = Alone() if agreement is None else agreement
        self._worker: PublishingWorker | None = None
        self._number = start_version
        self._version = start_version
        self._begun = 0
        self._steps = 0
        self._is_registered = False
        self._is_published = False
        self._is_offered = False
        self._was_offered = False
        # Whether the memory holds what the number says, as far as steps have ended.
        self._is_current = True
        # Whether a step is going on, or one has not ended: the memory may hold half of what it does.
        self._is_stepping = False
        self._is_broken = False
        self._last_wait_s = 0.0

    @property
    def version(self) -> int:
        """The newest version that every rank has published."""
        return self._version

    @property
    def last_wait_s(self) -> float:
        """Seconds that the last `take_back()` waited for readers."""
        return self._last_wait_s

    def open(self, connect: Callable[[], PublishingWorker]) -> None:
        """Connect, register the weights and publish the first version; if that fails, nothing stays behind."""
        try:
            self._weights.refresh()
            self._agreed("publishing", lambda: self._begin(connect))
        except BaseException:
            self.close()
            raise

    def take_back(self) -> None:
        """Return when no reader can see the weights on any rank; at once if nothing is published.

        Raises DeadlineExceeded after `timeout_s` on all ranks if one of them still has readers: nothing has changed
        then, and calling it again goes on waiting.
        """
        self._last_wait_s = 0.0
        if not self._is_offered:
            return
        started = time.monotonic()
        try:
            self._agreed(f"taking back version {self._number}", self._unpublish)
        finally:
            self._last_wait_s = time.monotonic() - started
        self._is_offered = False

    def put_back(self) -> None:
        """Publish the weights under the number that they had when they were taken back.

        Nothing is published between the first and the last of `every` steps. Raises StateError on all ranks if the
        last step did not end on one of them: then weights are neither those of that number nor of another one.
        """
        if self._is_current and not self._is_stepping:
            self._offer()
        else:
            self._agreed(f"publishing version {self._number}", self._require_whole)

    def before_step(self) -> None:
        """Take the weights back for a step, which may change them until `stepped()`; raises as `take_back()`."""
        if self._is_stepping:
            self.step_failed()
        was_offered = self._is_offered
        self.take_back()
        self._was_offered = was_offered
        self._is_stepping = True
        self._begun += 1

    def step_failed(self) -> None:
        """Log that a step has raised; nothing is published until one succeeds."""
        self._is_stepping, self._is_broken, self._is_current = False, True, False
        get_logger("megatron").warning(
            "an optimizer step did not end: version %d was the newest, and nothing is published until a step succeeds, "
            "or publish(changed=True) says that the weights are whole",
            self._version,
        )

    def stepped(self, changed: bool) -> None:
        """Publish what a step made: every `every`-th time the next version, the same one if it changed nothing."""
        self._is_stepping = False
        # One rank must not gather the new weights, or publish them, while another one has skipped.
        self._agreement.settle(
            "whether the step changed the weights (1) or skipped (0)", None, int(changed), self._begun
        )
        if not changed:
            if self._was_offered:
                self._offer()
            return
        self._is_broken = False
        self._steps += 1
        if self._steps % self._every == 0:
            self.publish_next()
        else:
            self._is_current = False

    def publish_next(self) -> None:
        """Publish the weights as the next version. Raises what describing, registering and publishing raise."""
        self._weights.refresh()
        self._number += 1
        self._steps = 0
        self._is_current, self._is_stepping, self._is_broken = True, False, False
        self._offer()

    @property
    def is_offered(self) -> bool:
        """Tell whether a rank may have the weights published."""
        return self._is_offered

    def forget_memory(self) -> None:
        """Register the memory again before the next publish, also if it lies at the same addresses."""
        self._is_registered = False

    def close(self) -> None:
        """Leave; for this rank alone. Idempotent."""
        worker, self._worker = self._worker, None
        self._is_published = self._is_offered = False
        try:
            if worker is not None:
                worker.close()
        finally:
            self._agreement.close()

    def _begin(self, connect: Callable[[], PublishingWorker]) -> None:
        found = self._weights.describe()  # what cannot be described is refused without a hub, too
        self._worker = connect()
        self._is_offered = True
        self._worker.register(found.tensors, found.boxes)
        self._is_registered = True
        self._publish()

    def _agreed(self, what: str, act: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            act()
        except Exception as found:
            error = found
        self._agreement.settle(what, error, self._number, self._begun)

    def _require_whole(self) -> None:
        if self._is_stepping or self._is_broken:
            raise StateError(
                "the last optimizer step did not end, so that the weights may be half of what it does: step again, or "
                "restore them and call publish(changed=True)"
            )

    def _offer(self) -> None:
        self._is_offered = True  # on some rank, whatever comes
        self._agreed(f"publishing version {self._number}", self._publish)
        self._version = self._number

    def _publish(self) -> None:
        assert self._worker is not None
        if not self._is_registered or self._weights.moved():
            self._register(self._worker)
        try:
            self._worker.publish(self._number)
        except RegistrationError:
            # Memory that moved without the parameters having been exchanged.
            self._register(self._worker)
            self._worker.publish(self._number)
        self._is_published = True

    def _register(self, worker: PublishingWorker) -> None:
        self._is_registered = False
        found = self._weights.describe()
        worker.register(found.tensors, found.boxes)
        self._is_registered = True

    def _unpublish(self) -> None:
        if self._is_published:
            assert self._worker is not None
            self._wait_for_readers(self._worker)
            self._is_published = False

    def _wait_for_readers(self, worker: PublishingWorker) -> None:
        """Take back, and log now and then for what that waits: a step that waits looks like one that hangs."""
        started, limit_s, waited_s = time.monotonic(), self._timeout_s, 0.0
        while True:
            piece_s = None if limit_s is None else min(limit_s - waited_s, REPORT_S)
            try:
                worker.unpublish(timeout_s=piece_s)
                return
            except (DeadlineExceeded, ServerUnreachable) as error:
                waited_s = time.monotonic() - started
                if piece_s is None or limit_s is None or waited_s >= limit_s or waited_s < piece_s:
                    raise  # time is up, or waiting is of no use
                what = f"version {self._number} is not taken back yet, and the step waits, for {limit_s:.0f} s at most"
                get_logger("megatron").warning("%s, %.0f s have passed: %s", what, waited_s, error)


def whole_number(what: str, value: Any, least: int) -> int:
    """Return a whole number of any type; raises ConfigError for another value, or a smaller one."""
    try:
        number = index(value)
    except TypeError:
        raise ConfigError(f"{what} = {value!r} must be a whole number") from None
    if number < least:
        raise ConfigError(f"{what} = {number} must be at least {least}")
    return number
