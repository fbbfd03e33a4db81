"""Swap the weights of an in-process `vllm.LLM`: the same transaction as the server's, without an event loop."""

from __future__ import annotations

import time
from typing import Any, Literal

from tensorhub_core.client.observer import observe
from tensorhub_core.engine.calls import RankReply, report_of
from tensorhub_core.engine.config import PauseMode, WeightSourceConfig, weight_source_config
from tensorhub_core.engine.steps import (
    Discard,
    EngineStatus,
    Install,
    Look,
    Pause,
    Process,
    Publish,
    ResetCaches,
    SetVersion,
    ShardReport,
    Stage,
    Step,
    SwapOutcome,
    Update,
    drive,
)
from tensorhub_core.engine.swap import Swapper
from tensorhub_core.errors import DeadlineExceeded, StateError
from tensorhub_core.settings import load_settings

_LATE_S = 5.0
"""How much later than its own deadline a rank's report may come."""
_LOOK_S = 0.02


class OfflineEngine:
    """Swap versions into an `LLM` made with `engine_args(config)`. One thread, the one that calls `generate`."""

    def __init__(self, llm: Any, config: str | dict[str, Any] | WeightSourceConfig | None = None) -> None:
        """Ask the ranks what they loaded; raises StateError if they disagree."""
        self._llm = llm
        self._config = config if isinstance(config, WeightSourceConfig) else weight_source_config(config)
        self._timeout_s = self._config.timeout_s or load_settings().client.call_timeout_s
        replies = self._replies("describe")
        status = EngineStatus(self._config.model, str(replies[0].get("replica", "")))
        self._swapper = Swapper(status, time.monotonic, self._config.staged)
        self._swapper.started([report_of(reply) for reply in replies])
        llm.update_weight_version(str(self.status.version))

    @property
    def status(self) -> EngineStatus:
        """Return what the engine serves."""
        return self._swapper.status

    def swap(self, version: int | Literal["latest"] = "latest", mode: PauseMode | None = None) -> SwapOutcome:
        """Bring all ranks to a version; the outcome says whether they are proven to serve it."""
        return drive(self._swapper.swap(version, mode or self._config.mode), self._perform)

    def _perform(self, step: Step) -> Any:
        llm = self._llm
        match step:
            case Look(version=version):
                with observe(self._config.server, model=self._config.model, zone=self._config.zone) as observer:
                    return observer.find(None if version == "latest" else version).key
            case Pause():
                if llm.llm_engine.has_unfinished_requests():
                    raise StateError("requests are unfinished: swap between two calls of generate()")
            case Update(version=version):
                return self._ranks("update", version=version, timeout_s=self._timeout_s)
            case Stage(version=version):
                return self._stage(version)
            case Install():
                return self._ranks("install", timeout_s=self._timeout_s)
            case Discard():
                self._ranks("discard")
            case Process():
                return self._ranks("process")
            case ResetCaches():
                return llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            case Publish():
                return self._ranks("publish")
            case SetVersion(version=version):
                llm.update_weight_version(str(version))
        return None

    def _stage(self, version: int | Literal["latest"]) -> list[ShardReport]:
        reports = self._ranks("stage", version=version, timeout_s=self._timeout_s)
        until_s = time.monotonic() + self._timeout_s + _LATE_S
        while all(report.ok for report in reports):
            time.sleep(_LOOK_S)
            replies = self._replies("staged")
            reports = [report_of(reply) for reply in replies]
            if not any(reply.get("running") for reply in replies):
                break
            if time.monotonic() > until_s:
                raise DeadlineExceeded(f"version {version} was not staged within {self._timeout_s:g} s")
        return reports

    def _ranks(self, call: str, **arguments: Any) -> list[ShardReport]:
        return [report_of(reply) for reply in self._replies(call, **arguments)]

    def _replies(self, call: str, **arguments: Any) -> list[RankReply]:
        replies: list[RankReply] = self._llm.collective_rpc("tensorhub", args=(call, arguments))
        return replies
