"""Publish from Megatron-Bridge: a callback for `pretrain(..., callbacks=[...])`.

Megatron-Bridge needs a GPU to be installed: this is written for its documented interface, and tested against a
stand-in that follows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tensorhub_core.observe.log import get_logger
from tensorhub_megatron.attaching import attach
from tensorhub_megatron.publisher import Publisher


class TensorHubCallback:
    """Publish what Megatron-Bridge trains: `pretrain(config, forward_step, callbacks=[TensorHubCallback(server=...)])`.

    Attaches to the optimizer when training starts, as `attach()` does with the same keywords, publishes after every
    step, and leaves when training ends. `start_version` (None) is the number of steps done before, so that a resumed
    training goes on counting; versions then are training steps less the skipped ones.
    """

    def __init__(
        self, server: str | Sequence[str] | None = None, *, start_version: int | None = None, **attach_keywords: Any
    ) -> None:
        """Keep what `attach()` needs when training starts; raises TypeError for a keyword that it does not have."""
        self._keywords: dict[str, Any] = {"server": server, **attach_keywords}
        inspect.signature(attach).bind(None, None, start_version=0, **self._keywords)
        self._start_version = start_version
        self._publisher: Publisher | None = None
        self.checkpoints: dict[str, int] = {}
        """Which version the weights in each saved checkpoint are, by the checkpoint's path."""

    @property
    def version(self) -> int | None:
        """The newest version that was published, None before training started."""
        return None if self._publisher is None else self._publisher.version

    @property
    def last_wait_s(self) -> float:
        """Seconds that the last step waited for readers."""
        return 0.0 if self._publisher is None else self._publisher.last_wait_s

    def on_train_start(self, context: Any) -> None:
        """Publish the weights and follow the optimizer. Raises what `attach()` raises."""
        if self._publisher is None:
            done = int(context.state.train_state.step) if self._start_version is None else self._start_version
            self._publisher = attach(context.model, context.optimizer, start_version=done, **self._keywords)

    def on_train_step_start(self, context: Any) -> None:
        """Attach, if that was not done yet; weights stay readable until the optimizer is about to step."""
        self.on_train_start(context)

    def on_train_step_end(self, context: Any) -> None:
        """Log what was published; `attach()` has published it at the end of the optimizer's step."""
        if self._publisher is not None:
            get_logger("megatron").debug(
                "version %d is published, the step waited %.3f s for readers%s",
                self._publisher.version,
                self._publisher.last_wait_s,
                "; it was skipped" if context.skipped_iter else "",
            )

    def on_checkpoint_save(self, context: Any) -> None:
        """Remember which version a checkpoint holds."""
        if self._publisher is not None:
            self.checkpoints[str(context.checkpoint_name)] = self._publisher.version

    def on_train_end(self, context: Any) -> None:
        """Hand over and leave."""
        self.close()

    def close(self) -> None:
        """Leave the optimizer and the hub; idempotent."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
