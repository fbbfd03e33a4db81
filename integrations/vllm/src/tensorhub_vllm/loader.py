"""Load format `tensorhub`: a model's first weights come from peers, not from a file."""

from __future__ import annotations

import copy
import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tensorhub_core import connect
from tensorhub_core.client.observer import Observer, observe
from tensorhub_core.client.piecewise_round import PieceReader, connect_piecewise
from tensorhub_core.client.worker import Worker
from tensorhub_core.engine.config import WeightSourceConfig, check_version, weight_source_config
from tensorhub_core.engine.fit import Fit, agreed, fit, fit_logical
from tensorhub_core.engine.logical import LogicalTensor
from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.staging import Staging
from tensorhub_core.engine.waiting import await_version
from tensorhub_core.errors import StateError, VersionConflict, VersionUnavailable
from tensorhub_core.layout.casting import check_cast
from tensorhub_core.settings import Settings, load_settings
from tensorhub_vllm import compat
from tensorhub_vllm.memory import LoadedWeights

logger = init_logger("vllm.tensorhub")
CONFIG_KEY = "weight_source"
ATTRIBUTE = "_tensorhub_shard"
BOOTSTRAP_VERSION = 0
_HANDOVER_S = 5.0
"""An engine that is told to end has less time to hand over than a trainer: then its workers are killed."""


class TensorHubLoader(DefaultModelLoader):
    """Fill new engines from live weights; draft models still come from disk."""

    def __init__(self, load_config: Any) -> None:
        """Take our keys out of `model_loader_extra_config`; raises ConfigError."""
        extra = dict(load_config.model_loader_extra_config or {})
        self._config = weight_source_config(extra.pop(CONFIG_KEY, None))
        plain = copy.copy(load_config)
        plain.model_loader_extra_config, plain.load_format = extra, "auto"
        super().__init__(plain)
        self._seen: list[LogicalTensor] = []

    def download_model(self, model_config: Any) -> None:
        """Fetch weight files only where a start from disk is possible."""
        if self._config.bootstrap:
            super().download_model(model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """Create the model, fill it from peers (or bootstrap), process it and offer it.

        Raises LayoutMismatch before a byte moves if no version fits, DeadlineExceeded if none came in time.
        """
        if model_config is not vllm_config.model_config:
            draft: torch.nn.Module = super().load_model(vllm_config, model_config, prefix)
            return draft
        compat.check_supported(vllm_config)
        with compat.new_model(self, vllm_config, model_config, prefix) as (model, device):
            memory = LoadedWeights(model, vllm_config, model_config, device)
            session = HubSession(self._config, unique_replica(self._config))
            shard = self._start(session, memory, model_config)
        object.__setattr__(model, ATTRIBUTE, shard)  # nn.Module would take its tensors for submodules
        ready: torch.nn.Module = model.eval()
        return ready

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors and remember what they are."""
        for name, tensor in super().get_all_weights(model_config, model):
            self._seen.append(LogicalTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            yield name, tensor

    def _start(self, session: HubSession, memory: LoadedWeights, model_config: Any) -> EngineShard:
        if self._config.bootstrap and compat.from_first_rank("load" if session.nothing_there() else "fill") == "load":
            logger.info("no version of %r anywhere: loading from disk as version 0", self._config.model)
            self.load_weights(memory.model, model_config)
            shard = session.publish_first(memory, self._seen)
            if shard is not None:
                return shard
            logger.info("another engine was first to publish: filling from peers after all")
        return session.fill(memory)


class HubSession:
    """Open a rank's connection to the hub, once, and bring its memory to a first version."""

    def __init__(self, config: WeightSourceConfig, replica: str) -> None:
        """Connect nothing yet."""
        self.config, self.replica = config, replica
        self.shard, self.num_shards = compat.rank_and_count()
        self.timeout_s = config.timeout_s or load_settings().client.call_timeout_s

    def nothing_there(self) -> bool:
        """Tell whether nobody holds a version of the model whole."""
        with self._observe() as observer:
            try:
                observer.find()
            except VersionUnavailable:
                return True
        return False

    def fill(self, memory: LoadedWeights) -> EngineShard:
        """Wait for a version, fill the memory with it, process and offer it; raises what went wrong."""
        wanted = check_version(self.config.version)
        until_s = time.monotonic() + self.timeout_s
        described = self._agreed(memory, lambda: self._fit(memory, wanted))
        shard = self._shard(memory, described)
        shard.register()
        shard.fill(wanted, max(1.0, until_s - time.monotonic()))
        for report in (shard.process(), shard.publish()):
            if not report.ok:
                raise StateError(f"version {report.version} could not be put to use: {report.message}")
        self._log_start(shard)
        return shard

    def publish_first(self, memory: LoadedWeights, sources: list[LogicalTensor]) -> EngineShard | None:
        """Process what was loaded from disk and publish it as version 0.

        Returns None on every rank if another replica was faster with other bytes, or with a newer version.
        """
        described = self._agreed(memory, lambda: fit_logical(memory, sources, check_cast(self.config.cast)))
        shard = self._shard(memory, described)
        shard.register()
        memory.process()
        conflict = ""
        try:
            shard.bootstrap(BOOTSTRAP_VERSION)
        except VersionConflict as error:
            conflict = str(error)
        if any(compat.from_all_ranks(conflict)):
            shard.close()
            return None
        self._log_start(shard)
        return shard

    def attach(self, memory: LoadedWeights) -> EngineShard:
        """Make a rank that was loaded by other means ready for updates; its memory holds no version yet."""
        described = self._agreed(memory, lambda: self._fit(memory, "latest", memory.borrowed()))
        shard = self._shard(memory, described)
        shard.register()
        return shard

    def _fit(
        self,
        memory: LoadedWeights,
        wanted: int | Literal["latest"],
        loaded: AbstractContextManager[None] | None = None,
    ) -> Fit:
        """Describe the memory for the wanted version as soon as there is one, with its loaded form in place."""
        with self._observe() as observer:
            _, held = await_version(observer, wanted, self.timeout_s, logger.info, time.monotonic)
        with loaded or nullcontext():
            return fit(memory, held, check_cast(self.config.cast))

    def _agreed(self, memory: LoadedWeights, describe: Callable[[], Fit]) -> Fit:
        described = agreed(memory, describe, compat.from_all_ranks)
        if described.note:
            logger.warning("%s", described.note)
        return described

    def _shard(self, memory: LoadedWeights, described: Fit) -> EngineShard:
        staging = Staging(self._connect_staging, described.sources) if described.streamed else None
        return EngineShard(
            memory, self._connect(), described, staging, self.shard, self.timeout_s, logger.info, time.monotonic
        )

    def _connect(self) -> Worker:
        return connect(
            self.config.server,
            model=self.config.model,
            replica=self.replica,
            shard=self.shard,
            num_shards=self.num_shards,
            zone=self.config.zone,
            spot=self.config.spot,
            cast=self.config.cast,
            settings=_settings(),
        )

    def _connect_staging(self) -> PieceReader:
        return connect_piecewise(
            self.config.server,
            model=self.config.model,
            replica=f"{self.replica}/staging",
            shard=self.shard,
            num_shards=self.num_shards,
            zone=self.config.zone,
            cast=self.config.cast,
            settings=_settings(),
        )

    def _observe(self) -> Observer:
        return observe(self.config.server, model=self.config.model)

    def _log_start(self, shard: EngineShard) -> None:
        report = shard.report()
        logger.info(
            "shard %d of %d of %r serves version %s from %s (%d bytes, digest %s)",
            self.shard,
            self.num_shards,
            self.replica,
            report.served,
            report.source,
            report.total_bytes,
            report.digest,
        )


def unique_replica(config: WeightSourceConfig) -> str:
    """Return the replica's name, the same on every rank of the engine."""
    name = config.replica or f"vllm-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return compat.from_first_rank(name)


def _settings() -> Settings:
    settings = load_settings()
    handover_s = min(settings.client.handover_s, _HANDOVER_S)
    return dataclasses.replace(settings, client=dataclasses.replace(settings.client, handover_s=handover_s))
