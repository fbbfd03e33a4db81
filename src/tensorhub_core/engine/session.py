"""Open an engine rank's connection to the hub and bring its memory to a first version."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from tensorhub_core.client.connect import connect
from tensorhub_core.client.observer import Observer, observe
from tensorhub_core.client.piecewise_round import PieceReader, connect_piecewise
from tensorhub_core.client.worker import Worker
from tensorhub_core.engine.config import WeightSourceConfig, check_version
from tensorhub_core.engine.fit import EngineMemory, Fit, agreed, fit, fit_logical
from tensorhub_core.engine.logical import LogicalTensor
from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.staging import Staging
from tensorhub_core.engine.waiting import await_version
from tensorhub_core.errors import StateError, VersionConflict, VersionUnavailable
from tensorhub_core.layout.casting import check_cast
from tensorhub_core.settings import Settings, load_settings

BOOTSTRAP_VERSION = 0
_HANDOVER_S = 5.0
"""An engine that is told to end has less time to hand over than a trainer: then its workers are killed."""


class Ranks(Protocol):
    """The ranks of one engine, as one of them sees them."""

    @property
    def index(self) -> int:
        """Return which shard of the engine this rank is."""

    @property
    def count(self) -> int:
        """Return how many shards the engine has."""

    def from_all(self, text: str) -> list[str]:
        """Return what every rank says, in order of rank; all ranks have to call it. Long texts may be cut."""


class HubSession:
    """One rank's way to a first version. The thread that loads the model; every rank makes the same calls in order."""

    def __init__(self, config: WeightSourceConfig, ranks: Ranks, *, engine: str, log: logging.Logger) -> None:
        """Agree on the replica's name, connect nothing yet; `engine` begins the names of unnamed replicas."""
        self.config, self.ranks, self._log = config, ranks, log
        self.replica = from_first_rank(ranks, config.replica or unique_name(engine))
        self.timeout_s = config.timeout_s or load_settings().client.call_timeout_s

    def start(self, memory: EngineMemory, load: Callable[[], list[LogicalTensor]]) -> EngineShard:
        """Fill the memory from peers, or by `load` if the config says `bootstrap` and nobody holds a version.

        `load` returns what it read, and its bytes become version 0. Raises LayoutMismatch before a byte moves if no
        version fits, DeadlineExceeded if none came in time, and what else went wrong.
        """
        if self.config.bootstrap and from_first_rank(self.ranks, "load" if self.nothing_there() else "fill") == "load":
            self._log.info("no version of %r anywhere: loading from disk as version 0", self.config.model)
            shard = self.publish_first(memory, load())
            if shard is not None:
                return shard
            self._log.info("another engine was first to publish: filling from peers after all")
        return self.fill(memory)

    def nothing_there(self) -> bool:
        """Tell whether nobody holds a version of the model whole, in any zone."""
        with observe(self.config.server, model=self.config.model) as observer:
            try:
                observer.find()
            except VersionUnavailable:
                return True
        return False

    def fill(self, memory: EngineMemory) -> EngineShard:
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

    def publish_first(self, memory: EngineMemory, sources: list[LogicalTensor]) -> EngineShard | None:
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
        if any(self.ranks.from_all(conflict)):
            shard.close()
            return None
        self._log_start(shard)
        return shard

    def attach(self, memory: EngineMemory) -> EngineShard:
        """Make a rank that was loaded by other means ready for updates; its memory holds no version yet."""
        described = self._agreed(memory, lambda: self._fit(memory, "latest", memory.borrowed()))
        shard = self._shard(memory, described)
        shard.register()
        return shard

    def _fit(
        self,
        memory: EngineMemory,
        wanted: int | Literal["latest"],
        loaded: AbstractContextManager[None] | None = None,
    ) -> Fit:
        """Describe the memory for the wanted version as soon as there is one, with its loaded form in place."""
        with self._observe() as observer:
            _, held = await_version(observer, wanted, self.timeout_s, self._log.info, time.monotonic)
        with loaded or nullcontext():
            return fit(memory, held, check_cast(self.config.cast))

    def _agreed(self, memory: EngineMemory, describe: Callable[[], Fit]) -> Fit:
        described = agreed(memory, describe, self.ranks.from_all)
        if described.note:
            self._log.warning("%s", described.note)
        return described

    def _shard(self, memory: EngineMemory, described: Fit) -> EngineShard:
        staging = Staging(self._connect_staging, described.sources) if described.streamed else None
        return EngineShard(
            memory,
            self._connect(),
            described,
            staging,
            self.ranks.index,
            self.timeout_s,
            self._log.info,
            time.monotonic,
        )

    def _connect(self) -> Worker:
        return connect(
            self.config.server,
            model=self.config.model,
            replica=self.replica,
            shard=self.ranks.index,
            num_shards=self.ranks.count,
            zone=self.config.zone,
            host=self.config.host,
            rail=self.config.rail,
            spot=self.config.spot,
            cast=self.config.cast,
            settings=_settings(),
        )

    def _connect_staging(self) -> PieceReader:
        return connect_piecewise(
            self.config.server,
            model=self.config.model,
            replica=f"{self.replica}/staging",
            shard=self.ranks.index,
            num_shards=self.ranks.count,
            zone=self.config.zone,
            host=self.config.host,
            rail=self.config.rail,
            cast=self.config.cast,
            settings=_settings(),
        )

    def _observe(self) -> Observer:
        return observe(self.config.server, model=self.config.model, zone=self.config.zone)

    def _log_start(self, shard: EngineShard) -> None:
        report = shard.report()
        self._log.info(
            "shard %d of %d of %r serves version %s from %s (%d bytes, digest %s)",
            self.ranks.index,
            self.ranks.count,
            self.replica,
            report.served,
            report.source,
            report.total_bytes,
            report.digest,
        )


def from_first_rank(ranks: Ranks, text: str) -> str:
    """Return rank 0's text on every rank of the engine."""
    return ranks.from_all(text)[0]


def unique_name(engine: str) -> str:
    """Return a name for a replica that no other process makes."""
    return f"{engine}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _settings() -> Settings:
    settings = load_settings()
    handover_s = min(settings.client.handover_s, _HANDOVER_S)
    return dataclasses.replace(settings, client=dataclasses.replace(settings.client, handover_s=handover_s))
