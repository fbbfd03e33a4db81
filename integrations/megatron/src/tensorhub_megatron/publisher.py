"""Wrap an optimizer's step: take the published weights back, step, publish what came out.

Weights change in `step` alone, so they stay published, and readable by every engine, through the next forward and
backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensorhub_core import connect
from tensorhub_core.errors import RegistrationError, StateError
from tensorhub_core.settings import load_settings
from tensorhub_megatron.modules import named_weights
from tensorhub_megatron.publication import Publication, Registration
from tensorhub_megatron.stepping import MARK, follow, stepping, warn_of_others

if TYPE_CHECKING:
    import torch

    from tensorhub_core.settings import Settings


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
        self._is_closed = False
        try:
            self._optimizer = stepping(optimizer)
            self._detach = follow(self._optimizer, self)
            setattr(self._optimizer, MARK, self)
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

        Between the first and the last of `every` steps nothing is published: weights are in between versions then.
        Raises StateError after `close()`, with `changed` if the weights are published, and without it if the last step
        did not end.
        """
        if self._is_closed:
            raise StateError("this publisher is closed: attach again to publish more")
        if changed and self._publication.is_offered:
            raise StateError(
                f"version {self.version} is published: call unpublish() before the weights change, and "
                "publish(changed=True) after"
            )
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
        delattr(self._optimizer, MARK)
        self._publication.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> None:
        """Copies of an optimizer are followed by nobody."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Let an optimizer be saved; who loads it finds that nobody follows it."""
        return type(None), ()

    def before_step(self) -> None:
        """Take the weights back; for what follows the optimizer."""
        if not self._is_closed:
            self._publication.before_step()

    def after_step(self, changed: bool) -> None:
        """Publish what the step made; for what follows the optimizer."""
        if not self._is_closed:
            self._publication.stepped(changed)

    def step_failed(self) -> None:
        """Publish nothing, since the step has raised; for what follows the optimizer."""
        if not self._is_closed:
            self._publication.step_failed()


def attach_optimizer(
    module: torch.nn.Module,
    optimizer: Any,
    *,
    server: str | Sequence[str] | None = None,
    model: str = "policy",
    stream: str | None = None,
    start_version: int = 0,
    every: int = 1,
    tensors: Mapping[str, Any] | None = None,
    replica: str = "trainer",
    timeout_s: float | None = None,
    transport: str = "auto",
    settings: Mapping[str, object] | Settings | None = None,
) -> Publisher:
    """Publish the weights of `module` as `start_version`, and again after every `every`-th step of `optimizer`.

    For one process that holds the whole model: plain PyTorch, Hugging Face (give the attached optimizer to
    `Trainer(optimizers=...)`), or rank 0 of data-parallel training. Call it once, after the model has its device and
    dtype.
    Parameters are registered under their names, tied ones under each of them; nothing is copied. `tensors` replaces
    them, for example to publish buffers too, which then must not change between two steps. Parameters that were moved
    or exchanged since are registered anew. `timeout_s` bounds the wait for readers before a step; DeadlineExceeded
    then comes out of `optimizer.step`, which has changed nothing and may be called again. `server`, `transport` and
    `settings` are `tensorhub_core.connect`'s. Raises RegistrationError for parameters that are shards of a distributed
    tensor (`attach_fsdp` is for them), and what `connect`, `register` and `publish` raise; nothing stays attached then.
    """
    stepping(optimizer)
    if tensors is None:
        warn_of_others(module, optimizer)
    filled = load_settings(settings)
    publication = Publication(
        ModuleWeights(module, tensors),
        start_version=start_version,
        every=every,
        timeout_s=filled.client.call_timeout_s if timeout_s is None else timeout_s,
    )
    publication.open(
        lambda: connect(server, model=model, replica=replica, stream=stream, transport=transport, settings=filled)
    )
    return Publisher(publication, optimizer)


class ModuleWeights:
    """The parameters of a module in one process, or the tensors given instead."""

    def __init__(self, module: torch.nn.Module, tensors: Mapping[str, Any] | None = None) -> None:
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
        now = named_weights(self._module)
        return now.keys() != self._registered.keys() or any(now[name] is not p for name, p in self._registered.items())


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters of `module` by the model's own names, tied ones under each of them.

    Names are those of the model inside of DistributedDataParallel, torch.compile and the like. Raises
    RegistrationError for shards, for adapters, and if two parameters would have one name.
    """
    found = named_weights(module)
    for name, parameter in found.items():
        if hasattr(parameter, "placements"):
            raise RegistrationError(
                f"parameter {name!r} is a shard of a distributed tensor: attach_fsdp() publishes those, on every rank"
            )
    return found
