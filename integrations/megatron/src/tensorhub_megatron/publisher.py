"""Wrap an optimizer's step: take the published weights back, step, publish what came out.

Weights change in `step` alone, so they stay published, and readable by every engine, through the next forward and
backward pass. A step that leaves the weights as they were (a loss scaler that saw an overflow never calls `step`;
Megatron's optimizer returns False) makes no new version.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from tensorhub_core import connect
from tensorhub_core.errors import ConfigError, RegistrationError, StateError

if TYPE_CHECKING:
    import torch


class PublishingWorker(Protocol):
    """What a `Publisher` needs of a `tensorhub_core` worker."""

    def publish(self, version: int) -> Any:
        """Make the registered memory readable as `version`."""

    def unpublish(self, timeout_s: float | None = None) -> Any:
        """Return when no reader can see the memory any more."""

    def close(self) -> None:
        """Leave."""


class Publisher:
    """Publishes after every `every`-th step of one optimizer, until closed. Use it from the training thread."""

    def __init__(
        self,
        worker: PublishingWorker,
        optimizer: Any,
        *,
        start_version: int = 0,
        every: int = 1,
        timeout_s: float | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Publish `start_version` and wrap `optimizer.step`; `worker` has the weights registered already.

        `timeout_s` bounds the wait for readers before a step; DeadlineExceeded then comes out of `optimizer.step`,
        which has changed nothing and may be called again. `check` runs before each publish, and what it raises keeps
        the version from being published. Raises ConfigError for impossible numbers, StateError if the
        optimizer is attached already, and what `worker.publish` raises.
        """
        if every < 1 or start_version < 0:
            raise ConfigError(f"every = {every} must be at least 1, start_version = {start_version} at least 0")
        if getattr(optimizer.step, "_tensorhub_publisher", None) is not None:
            raise StateError("this optimizer is attached already: close() the first publisher, or keep using it")
        self._worker = worker
        self._optimizer = optimizer
        self._every = every
        self._timeout_s = timeout_s
        self._check = check
        self._version = start_version
        self._steps = 0
        self._is_published = False
        self._is_closed = False
        self._last_wait_s = 0.0
        self._publish(start_version)
        self._own_step = vars(optimizer).get("step")
        self._wrapped = self._wrap(optimizer.step)
        optimizer.step = self._wrapped

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self._version

    @property
    def last_wait_s(self) -> float:
        """Seconds that the last step waited for readers."""
        return self._last_wait_s

    def close(self) -> None:
        """Give the optimizer its own step back and leave; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if vars(self._optimizer).get("step") is self._wrapped:
            if self._own_step is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._own_step
        self._worker.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wrap(self, step: Callable[..., Any]) -> types.MethodType:
        # A bound method, and one that shows the wrapped signature: learning rate schedulers and loss scalers look.
        @functools.wraps(step)
        def publishing_step(_: Any, *args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs) if self._is_closed else self._step(step, *args, **kwargs)

        publishing_step._tensorhub_publisher = self  # type: ignore[attr-defined]
        return types.MethodType(publishing_step, self._optimizer)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        was_published = self._is_published
        if was_published:
            self._unpublish()
        result = step(*args, **kwargs)
        if _left_weights_alone(result):
            if was_published:
                self._publish(self._version)
            return result
        self._steps += 1
        if self._steps % self._every == 0:
            self._publish(self._version + 1)
        return result

    def _publish(self, version: int) -> None:
        if self._check is not None:
            self._check()
        self._worker.publish(version)
        self._version = version
        self._is_published = True

    def _unpublish(self) -> None:
        started = time.monotonic()
        try:
            self._worker.unpublish(timeout_s=self._timeout_s)
        finally:
            self._last_wait_s = time.monotonic() - started
        self._is_published = False


def _left_weights_alone(result: Any) -> bool:
    """Tell from what `step` returned whether it skipped: Megatron's returns (success, norm, zeros)."""
    return isinstance(result, tuple) and len(result) > 0 and result[0] is False


def attach_optimizer(
    module: torch.nn.Module,
    optimizer: Any,
    *,
    server: str | None = None,
    model: str = "policy",
    replica: str = "trainer",
    stream: str | None = None,
    start_version: int = 0,
    every: int = 1,
    timeout_s: float | None = None,
    tensors: Mapping[str, Any] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Publisher:
    """Publish the weights of `module` as `start_version`, and again after every `every`-th step of `optimizer`.

    For one process that holds the whole model: plain PyTorch, Hugging Face (give the attached optimizer to
    `Trainer(optimizers=...)`), or rank 0 of data-parallel training. Call it once, after the model has its device and
    dtype.
    Parameters are registered under their names, tied ones under each of them; nothing is copied. `tensors` replaces
    them, for example to publish buffers too, which then must not change between two steps. `server` and `settings` are
    `tensorhub_core.connect`'s. Raises RegistrationError for parameters that are shards of a distributed tensor, and
    what `connect`, `register` and `publish` raise; nothing stays attached then.
    """
    chosen = parameters_of(module) if tensors is None else dict(tensors)
    worker = connect(server, model=model, replica=replica, stream=stream, settings=settings)
    try:
        worker.register(chosen)
        check = functools.partial(require_same, module, chosen) if tensors is None else None
        return Publisher(worker, optimizer, start_version=start_version, every=every, timeout_s=timeout_s, check=check)
    except BaseException:
        worker.close()
        raise


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters of `module` by name, tied ones under each name; raises RegistrationError for shards.

    The parameters themselves, not views of them: only so can memory that moved since be noticed.
    """
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "placements"):
            raise RegistrationError(
                f"parameter {name!r} is a shard of a distributed tensor: register the local shards yourself, "
                "with boxes that say where they lie (Worker.register(tensors, boxes=...))"
            )
        found[name] = parameter
    return found


def require_same(module: torch.nn.Module, registered: Mapping[str, Any]) -> None:
    """Raise RegistrationError naming a parameter that `module` no longer has under its name.

    A parameter that was replaced by another object would leave the old one's memory published: stale weights.
    """
    now = dict(module.named_parameters(remove_duplicate=False))
    replaced = [name for name, parameter in registered.items() if now.get(name) is not parameter]
    if replaced:
        raise RegistrationError(
            f"parameter {replaced[0]!r} was replaced since attach_optimizer(), so that its old memory is registered: "
            "close() the publisher and attach again"
        )
