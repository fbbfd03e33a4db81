"""Follow the steps of an optimizer, whoever calls them and however they end.

A step that leaves the weights as they were makes no new version: a loss scaler that saw an overflow never calls `step`,
or lets one that can tell skip inside of it (fused optimizers); Megatron's optimizer returns False.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from tensorhub_core.errors import ConfigError, StateError
from tensorhub_core.observe.log import get_logger

MARK = "_tensorhub_publisher"
"""The attribute of an optimizer that is followed."""
_STEP_IN_BACKWARD = ("Lomo", "AdaLomo", "LayerWiseDummyOptimizer", "DeepSpeedOptimizerWrapper")
"""Of lomo_optim; of transformers, for GaLore and its kin layer by layer; of accelerate, for DeepSpeed."""


class Follower(Protocol):
    """Who is told of the steps of an optimizer."""

    def before_step(self) -> None:
        """A step begins; one that raises lets it not begin."""

    def after_step(self, changed: bool) -> None:
        """A step has ended, and has changed the weights or left them alone."""

    def step_failed(self) -> None:
        """A step has raised. Of an optimizer with hooks this is not told: its next step just begins."""


def stepping(optimizer: Any) -> Any:
    """Return the optimizer whose `step` changes weights: what accelerate wraps, else the one given.

    Raises StateError if it is attached already, ConfigError if weights change outside of its `step`.
    """
    while any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    if _steps_in_backward(optimizer):
        raise ConfigError(
            f"with {type(optimizer).__name__} weights change during the backward pass, when they are published: use an "
            "optimizer that changes them in step() alone, or publish by hand with tensorhub_core.connect()"
        )
    if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"a {type(optimizer).__name__} has no step() to follow: give one optimizer, or one object that steps all"
        )
    if getattr(optimizer, MARK, None) is not None:
        raise StateError("this optimizer is attached already: close() the first publisher, or keep using it")
    return optimizer


def _steps_in_backward(optimizer: Any) -> bool:
    if any(kind.__name__ in _STEP_IN_BACKWARD for kind in type(optimizer).__mro__):
        return True
    if getattr(optimizer, "_overlap_with_ddp", False):  # torch's ZeroRedundancyOptimizer
        return True
    groups = getattr(optimizer, "param_groups", None) or ()
    return any(
        getattr(parameter, "_in_backward_optimizers", None)  # torch's _apply_optimizer_in_backward()
        for group in groups
        for parameter in group["params"]
    )


def warn_of_others(module: Any, optimizer: Any) -> None:
    """Log which parameters an optimizer leaves out that somebody may train: nobody would take those back before."""
    groups = getattr(optimizer, "param_groups", None) or ()
    own = {id(parameter) for group in groups for parameter in group["params"]}
    named = list(module.named_parameters()) if callable(getattr(module, "named_parameters", None)) else []
    others = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in own]
    if others and any(id(parameter) in own for _, parameter in named):
        get_logger("megatron").warning(
            "%d parameters that require gradients are not the optimizer's (%s%s): if another optimizer steps them, it "
            "changes what is published, and engines refuse every version: give one object whose step() steps all",
            len(others),
            ", ".join(others[:3]),
            " and more" if len(others) > 3 else "",
        )


def follow(optimizer: Any, follower: Follower) -> Callable[[], None]:
    """Tell `follower` of each step; return what ends that.

    By torch's own hooks where there are any: loss scalers and accelerate exchange the `step` of an instance.
    """
    return _hook(optimizer, follower) if _has_hooks(optimizer) else _wrap(optimizer, follower)


def _has_hooks(optimizer: Any) -> bool:
    """Tell whether torch runs hooks around `step`: it gives them to classes whose instances were made by its own."""
    return bool(getattr(getattr(type(optimizer), "step", None), "hooked", False)) and hasattr(
        optimizer, "_optimizer_step_post_hooks"
    )


def _hook(optimizer: Any, follower: Follower) -> Callable[[], None]:
    # A step may call that of its base class, which has the same hooks: only the outer one counts. One that has raised
    # is no longer on the stack.
    begun: list[FrameType] = []

    def before(*_: Any) -> None:
        begun[:] = _running(begun)
        if not begun:
            follower.before_step()
            optimizer._optimizer_step_post_hooks.move_to_end(
                last.id
            )  # after those that change weights, such as a clamp
        begun.append(sys._getframe(1))

    def after(*_: Any) -> None:
        if begun:
            begun[:] = _running(begun)[:-1]
            if not begun:
                follower.after_step(not skipped_inside(optimizer))

    first, last = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)

    def remove() -> None:
        first.remove()
        last.remove()

    return remove


def _running(frames: list[FrameType]) -> list[FrameType]:
    """Return those of some frames that this call comes from."""
    callers = set(_callers()) if frames else ()
    return [frame for frame in frames if frame in callers]


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def skipped_inside(optimizer: Any) -> bool:
    """Tell whether the step that ends left the weights alone since a loss scaler had told it of an overflow.

    torch's scaler lets optimizers that can tell (`fused=True`) skip by themselves, and leaves word on them meanwhile.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class SkippedInside:
    """Remembers whether the last step of an optimizer with hooks was one that it skipped inside."""

    def __init__(self) -> None:
        """Follow nobody yet."""
        self.last = False
        self._handle: Any = None

    def follow(self, optimizer: Any) -> None:
        """Follow an optimizer instead of the one before, if there is one and it has hooks."""
        self.end()
        if optimizer is not None and _has_hooks(optimizer):
            self._handle = optimizer.register_step_post_hook(self._after)

    def end(self) -> None:
        """Follow nobody any more; idempotent."""
        handle, self._handle, self.last = self._handle, None, False
        if handle is not None:
            handle.remove()

    def _after(self, optimizer: Any, *_: Any) -> None:
        self.last = skipped_inside(optimizer)


def _wrap(optimizer: Any, follower: Follower) -> Callable[[], None]:
    step, own = optimizer.step, vars(optimizer).get("step")

    # A bound method, and one that shows the wrapped signature: learning rate schedulers look.
    @functools.wraps(step)
    def publishing_step(this: Any, *args: Any, **kwargs: Any) -> Any:
        if this is not optimizer:  # a copy of it
            return types.MethodType(getattr(step, "__func__", type(this).step), this)(*args, **kwargs)
        follower.before_step()
        try:
            result = step(*args, **kwargs)
        except BaseException:
            follower.step_failed()
            raise
        follower.after_step(not _left_weights_alone(result))
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
