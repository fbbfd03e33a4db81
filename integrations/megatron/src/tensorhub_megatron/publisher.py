"""Wrap an optimizer's step: take the published weights back, step, publish what came out.

Weights change in `step` alone, so they stay published, and readable by every engine, through the next forward and
backward pass. A step that leaves the weights as they were (a loss scaler that saw an overflow never calls `step`;
Megatron's optimizer returns False) makes no new version.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensorhub_core import connect
from tensorhub_core.errors import ConfigError, RegistrationError, StateError
from tensorhub_megatron.publication import Publication, Registration

if TYPE_CHECKING:
    import torch

_MARK = "_tensorhub_publisher"
_STEP_IN_BACKWARD = ("Lomo", "AdaLomo", "LayerWiseDummyOptimizer", "DeepSpeedOptimizerWrapper")
"""Of lomo_optim; of transformers, for GaLore and its kin layer by layer; of accelerate, for DeepSpeed."""


class Publisher:
    """Publishes after every `every`-th step of one optimizer, until closed; a context manager.

    On several ranks each has one; `step`, `unpublish` and `publish` are called by all of them alike, from the training
    thread.
    """

    def __init__(self, publication: Publication, optimizer: Any) -> None:
        """Take over an open publication and follow `optimizer`; `attach()` and its kin do this.

        If that fails, the publication is closed.
        """
        self._publication = publication
        self._was_offered = False
        self._is_closed = False
        try:
            self._optimizer = stepping(optimizer)
            self._detach = _follow(self._optimizer, self._before, self._after)
            setattr(self._optimizer, _MARK, self)
        except BaseException:
            publication.close()
            raise

    @property
    def version(self) -> int:
        """The newest version that was published, by every rank."""
        return self._publication.version

    @property
    def last_wait_s(self) -> float:
        """Seconds that the last step waited for readers, of this rank or of another one."""
        return self._publication.last_wait_s

    def unpublish(self) -> None:
        """Take the weights back until `publish()`: before they are offloaded, or changed by anything but the optimizer.

        Returns when no reader can see them any more. Raises DeadlineExceeded after `timeout_s`.
        """
        self._publication.take_back()
        self._publication.forget_memory()

    def publish(self, *, changed: bool = False) -> None:
        """Publish the weights again after `unpublish()`, wherever they lie now; `changed`: as the next version.

        Raises StateError after `close()`.
        """
        if self._is_closed:
            raise StateError("this publisher is closed: attach again to publish more")
        if changed:
            self._publication.publish_next()
        else:
            self._publication.put_back()

    def close(self) -> None:
        """Leave the optimizer alone, and leave the hub; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._detach()
        delattr(self._optimizer, _MARK)
        self._publication.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _before(self) -> None:
        if not self._is_closed:
            self._was_offered = self._publication.is_offered
            self._publication.take_back()

    def _after(self, changed: bool) -> None:
        if not self._is_closed:
            self._publication.stepped(changed, self._was_offered)


def stepping(optimizer: Any) -> Any:
    """Return the optimizer whose `step` changes weights: what accelerate wraps, else the one given.

    Raises StateError if it is attached already, ConfigError if weights change outside of its `step`.
    """
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    if type(optimizer).__name__ in _STEP_IN_BACKWARD:
        raise ConfigError(
            f"with {type(optimizer).__name__} weights change during the backward pass, when they are published: use an "
            "optimizer that changes them in step() alone, or publish by hand with tensorhub_core.connect()"
        )
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"a {type(optimizer).__name__} has no step() to follow: give one optimizer, or one object that steps all"
        )
    if getattr(optimizer, _MARK, None) is not None:
        raise StateError("this optimizer is attached already: close() the first publisher, or keep using it")
    return optimizer


def _follow(optimizer: Any, before: Callable[[], None], after: Callable[[bool], None]) -> Callable[[], None]:
    """Have `before` and `after` called around each step; return what ends that.

    torch's own hooks where there are any: loss scalers and accelerate exchange the `step` of an instance.
    """
    if hasattr(optimizer, "register_step_pre_hook") and hasattr(optimizer, "register_step_post_hook"):
        first = optimizer.register_step_pre_hook(lambda *_: before())
        last = optimizer.register_step_post_hook(lambda *_: after(True))

        def remove() -> None:
            first.remove()
            last.remove()

        return remove
    return _wrap(optimizer, before, after)


def _wrap(optimizer: Any, before: Callable[[], None], after: Callable[[bool], None]) -> Callable[[], None]:
    step, own = optimizer.step, vars(optimizer).get("step")

    # A bound method, and one that shows the wrapped signature: learning rate schedulers look.
    @functools.wraps(step)
    def publishing_step(_: Any, *args: Any, **kwargs: Any) -> Any:
        before()
        result = step(*args, **kwargs)
        after(not _left_weights_alone(result))
        return result

    wrapped = types.MethodType(publishing_step, optimizer)
    optimizer.step = wrapped

    def unwrap() -> None:
        if vars(optimizer).get("step") is not wrapped:
            return  # somebody wrapped ours: it stays in between, and does nothing any more
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own

    return unwrap


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
    them, for example to publish buffers too, which then must not change between two steps. Parameters that were moved
    or exchanged since are registered anew. `timeout_s` bounds the wait for readers before a step; DeadlineExceeded
    then comes out of `optimizer.step`, which has changed nothing and may be called again. `server` and `settings` are
    `tensorhub_core.connect`'s. Raises RegistrationError for parameters that are shards of a distributed tensor
    (`attach_fsdp` is for them), and what `connect`, `register` and `publish` raise; nothing stays attached then.
    """
    stepping(optimizer)
    publication = Publication(
        _ModuleWeights(module, tensors), start_version=start_version, every=every, timeout_s=timeout_s
    )
    publication.open(lambda: connect(server, model=model, replica=replica, stream=stream, settings=settings))
    return Publisher(publication, optimizer)


class _ModuleWeights:
    """The parameters of a module in one process, or the tensors given instead."""

    def __init__(self, module: torch.nn.Module, tensors: Mapping[str, Any] | None) -> None:
        self._module = module
        self._given = None if tensors is None else dict(tensors)
        self._registered: dict[str, Any] = {}

    def refresh(self) -> None:
        """Parameters are what the step has written."""

    def describe(self) -> Registration:
        """Return the parameters themselves, not views of them: only so can memory that moved since be noticed."""
        self._registered = parameters_of(self._module) if self._given is None else self._given
        return Registration(self._registered)

    def moved(self) -> bool:
        """Tell whether a parameter was exchanged for another one."""
        if self._given is not None:
            return False
        now = dict(self._module.named_parameters(remove_duplicate=False))
        return now.keys() != self._registered.keys() or any(now[name] is not p for name, p in self._registered.items())


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters of `module` by name, tied ones under each name; raises RegistrationError for shards."""
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "placements"):
            raise RegistrationError(
                f"parameter {name!r} is a shard of a distributed tensor: attach_fsdp() publishes those, on every rank"
            )
        found[name] = parameter
    return found
