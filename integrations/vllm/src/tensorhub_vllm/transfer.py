"""vLLM's own weight-transfer API with backend `tensorhub`: pause, start, update, finish, resume are the caller's.

`init_info` takes the keys of `--weight-source-config` (all optional), `update_info` one: `version`, a number or
"latest". An engine that was started with `--weight-source tensorhub` uses the connection it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tensorhub_core.engine.config import check_version, weight_source_config
from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.steps import ShardReport
from tensorhub_core.errors import StateError, error_from_wire
from tensorhub_vllm import BACKEND, compat
from tensorhub_vllm.loader import ATTRIBUTE, session_of
from tensorhub_vllm.memory import LoadedWeights
from tensorhub_vllm.rebuild import rebuilt_slots


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How to connect; None = as the engine was started."""

    server: str | None = None
    model: str | None = None
    replica: str | None = None
    zone: str | None = None
    host: str | None = None
    rail: str | None = None
    spot: bool | None = None
    timeout_s: float | None = None

    def keys(self) -> dict[str, Any]:
        """Return what was given, by the keys of `--weight-source-config`."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to update to."""

    version: int | str = "latest"


class TensorHubTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Fill, process and offer this rank's weights. Failures are raised: `compat` makes that safe for several ranks."""

    backend = BACKEND
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _connected_here = False

    @property
    def _shard(self) -> EngineShard | None:
        return getattr(self.model, ATTRIBUTE, None)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect, unless the engine is; raises ConfigError, ServerUnreachable, LayoutMismatch."""
        if self._shard is not None:
            if init_info.keys():
                raise StateError("this engine is connected by --weight-source-config: give no init_info")
            return
        compat.check_supported(self.vllm_config)
        config = weight_source_config(init_info.keys())
        slots = rebuilt_slots(self.model)
        memory = LoadedWeights(self.model, self.vllm_config, self.model_config, self.device, slots)
        object.__setattr__(self.model, ATTRIBUTE, session_of(config).attach(memory))
        self._connected_here = True

    def start_weight_update(self) -> None:
        """Nothing to prepare: memory is touched only when a version is promised."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Bring this rank to a version and make it compute with it; raises the hub's errors."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fill in one round with the other ranks, then process and offer."""
        shard = self._shard
        if shard is None:
            raise StateError("call init_weight_transfer_engine first")
        version = check_version(update_info.version)
        steps: tuple[Callable[[], ShardReport], ...] = (lambda: shard.update(version), shard.process, shard.publish)
        for step in steps:
            report = step()
            if not report.ok:
                raise error_from_wire(report.code, report.message)

    def finish_weight_update(self) -> None:
        """Nothing is left to do: an update is whole or was refused."""

    def disconnect(self) -> None:
        """Leave the hub if `init_transfer_engine` connected; an engine that was started from a hub stays in it."""
        if self._connected_here:
            self.shutdown()
            object.__delattr__(self.model, ATTRIBUTE)
            self._connected_here = False

    def shutdown(self) -> None:
        """Take this rank's copy back and leave the hub."""
        shard = self._shard
        if shard is not None:
            shard.close()
