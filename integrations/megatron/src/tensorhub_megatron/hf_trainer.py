"""Publish from Hugging Face's `Trainer`, and from the trainers that are made of it, such as TRL's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from tensorhub_core.errors import ConfigError
from tensorhub_megatron.attaching import open_publication
from tensorhub_megatron.fsdp import ShardedWeights
from tensorhub_megatron.publication import Publication
from tensorhub_megatron.stepping import SkippedInside, stepping

if TYPE_CHECKING:
    from tensorhub_core.settings import Settings


class TensorHubTrainerCallback(TrainerCallback):
    """Publish a `Trainer`'s model: `Trainer(..., callbacks=[TensorHubTrainerCallback(server=..., stream="run-17")])`.

    Publishes the model when training begins, as version `start_version` (None: the number of steps done before, so that
    a resumed training goes on counting), and the next version at the end of every `every`-th optimizer step. Between
    the last backward pass and the end of the step nobody can read: the callback waits for readers, at most `timeout_s`.
    Gradient accumulation makes one version per optimizer step, a step that a loss scaler skipped makes none. Leaves the
    hub when training ends; after an exception call `close()`.

    Models that every rank has whole work, and FSDP2 (`fsdp_version: 2` of accelerate); what `attach_fsdp()` refuses is
    refused here, and so are DeepSpeed and optimizers that change weights during the backward pass, and
    `load_best_model_at_end`, which overwrites published weights. `cast="bf16"` publishes a copy
    in the type of the engines. On several ranks all are shards of one replica, as with `attach_fsdp()`.
    """

    def __init__(
        self,
        server: str | Sequence[str] | None = None,
        *,
        model: str = "policy",
        stream: str | None = None,
        start_version: int | None = None,
        every: int = 1,
        cast: str | None = None,
        replica: str = "trainer",
        timeout_s: float | None = None,
        transport: str = "auto",
        settings: Mapping[str, object] | Settings | None = None,
    ) -> None:
        """Keep what is needed when training begins; nothing is published yet."""
        self._names = (model, replica, stream)
        self._server = server
        self._start_version = start_version
        self._every = every
        self._cast = cast
        self._timeout_s = timeout_s
        self._transport = transport
        self._settings = settings
        self._publication: Publication | None = None
        self._skips = SkippedInside()

    @property
    def version(self) -> int | None:
        """The newest version that was published, None before training began."""
        return None if self._publication is None else self._publication.version

    @property
    def last_wait_s(self) -> float:
        """Seconds that the last step waited for readers."""
        return 0.0 if self._publication is None else self._publication.last_wait_s

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Connect and publish. Raises what `attach_fsdp()` raises."""
        inner = None if optimizer is None else stepping(optimizer)
        if getattr(args, "load_best_model_at_end", False):
            raise ConfigError(
                "load_best_model_at_end overwrites the weights while they are published: switch it off, and load the "
                "best checkpoint after training"
            )
        if self._publication is None:  # else training begins anew in the same process: auto_find_batch_size
            self._publication = open_publication(
                ShardedWeights(model, self._cast),
                names=self._names,
                server=self._server,
                start_version=int(state.global_step) if self._start_version is None else self._start_version,
                every=self._every,
                group=None,
                timeout_s=self._timeout_s,
                transport=self._transport,
                settings=self._settings,
            )
        self._skips.follow(inner)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until nobody reads the weights any more."""
        if self._publication is not None:
            self._publication.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        """Publish what the step made."""
        if self._publication is not None:
            skipped = bool(getattr(optimizer, "step_was_skipped", False)) or self._skips.last
            self._publication.stepped(not skipped)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand over and leave."""
        self.close()

    def close(self) -> None:
        """Hand over what is retained here, and leave; idempotent."""
        publication, self._publication = self._publication, None
        self._skips.end()
        if publication is not None:
            publication.close()
