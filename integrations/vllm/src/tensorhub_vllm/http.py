"""The engine's HTTP side: `GET /tensorhub/version`, `POST /tensorhub/update`, and the loop that follows the hub."""

from __future__ import annotations

import asyncio
import contextlib
import time
from argparse import Namespace
from typing import Any, Literal

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse
from vllm.logger import init_logger

from tensorhub_core.client.observer import Observer, observe
from tensorhub_core.engine.config import PauseMode, WeightSourceConfig, check_mode, check_version
from tensorhub_core.engine.follow import Follower, FollowStep, Sleep, SwapTo, WaitNewer
from tensorhub_core.engine.steps import (
    Discard,
    EngineStatus,
    Install,
    Look,
    Pause,
    Process,
    Publish,
    ResetCaches,
    Resume,
    SetVersion,
    ShardReport,
    Stage,
    Step,
    SwapOutcome,
    Update,
    drive_async,
    http_status,
)
from tensorhub_core.engine.swap import Swapper
from tensorhub_core.errors import ConfigError, DeadlineExceeded, StateError
from tensorhub_core.ids import VersionKey
from tensorhub_core.settings import load_settings
from tensorhub_core.state.messages import Available, Reply
from tensorhub_vllm import BACKEND, compat
from tensorhub_vllm.worker_ext import report_of

logger = init_logger("vllm.tensorhub.http")
_WAIT_S = 30.0
"""How long the follow loop waits before it looks at the engine's status again."""
_LATE_S = 5.0
"""How much later than its own deadline a rank's report may come."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.1
"""How long to wait between two looks at what is being staged: each one comes between two steps of the model."""
_LEAVE_S = 10.0
"""How long an engine that ends waits for those who still read from it."""


class EngineFront:
    """Swap a running vLLM server's weights. All methods belong to the API server's event loop."""

    def __init__(self, engine: Any, config: WeightSourceConfig) -> None:
        """Take over an engine that was started with `--weight-source tensorhub`."""
        self.config = config
        self._engine = engine
        self._observer: Observer | None = None
        self._lock = asyncio.Lock()
        self._timeout_s = config.timeout_s or load_settings().client.call_timeout_s
        self._swapper = Swapper(EngineStatus(config.model, config.replica or ""), time.monotonic, config.staged)
        self._following: asyncio.Task[None] | None = None

    @property
    def status(self) -> EngineStatus:
        """Return what the engine serves."""
        return self._swapper.status

    async def start(self) -> None:
        """Ask the ranks what they loaded, tell vLLM its version and begin to follow; raises if the ranks disagree."""
        replies = await self._engine.collective_rpc("tensorhub_describe")
        self._swapper.status = EngineStatus(self.config.model, str(replies[0].get("replica", "")))
        self._swapper.started([report_of(reply) for reply in replies])
        self._observer = await asyncio.to_thread(observe, self.config.server, model=self.config.model)
        await self._engine.update_weight_version(str(self.status.version))
        compat.before_shutdown(self._engine, self.leave, _LEAVE_S)
        if self.config.follow and self.config.version == "latest":
            self._following = asyncio.create_task(self._follow(), name="tensorhub-follow")
            self._following.add_done_callback(_log_end)

    async def leave(self) -> None:
        """Stop following and let every rank leave the hub, so that nobody is sent to an engine that ends."""
        if self._following is not None:
            self._following.cancel()
        async with self._lock:
            await self._ranks("tensorhub_leave")
        if self._observer is not None:
            await asyncio.to_thread(self._observer.close)

    async def swap(self, version: int | Literal["latest"], mode: PauseMode) -> SwapOutcome:
        """Carry out one swap; a second one waits for the first. Raises DeadlineExceeded if that takes too long."""
        # A client that hangs up must not leave the engine half swapped.
        return await asyncio.shield(asyncio.create_task(self._swap(version, mode)))

    async def _swap(self, version: int | Literal["latest"], mode: PauseMode) -> SwapOutcome:
        try:
            await asyncio.wait_for(self._lock.acquire(), self._timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"another swap has been running for {self._timeout_s:g} s") from None
        try:
            outcome = await drive_async(self._swapper.swap(version, mode), self._perform)
        finally:
            self._lock.release()
        times = self.status.last_swap
        if outcome.ok and outcome.changed and times is not None:
            logger.info(
                "swapped to version %s from %s (drain %.3f s, transfer %.3f s, process %.3f s, total %.3f s)",
                outcome.version,
                ", ".join(sorted({report.source or "?" for report in self.status.shards})),
                times.drain_s,
                times.transfer_s,
                times.process_s,
                times.total_s,
            )
        elif not outcome.ok:
            logger.warning("swap to %s failed, %s: %s", version, self.status.state, outcome.message)
        return outcome

    async def _perform(self, step: Step) -> Any:
        engine = self._engine
        match step:
            case Look(version=version):
                assert self._observer is not None
                number = None if version == "latest" else version
                return (await asyncio.to_thread(self._observer.find, number)).key
            case Pause(mode=mode):
                await asyncio.wait_for(engine.pause_generation(mode=mode, clear_cache=True), self._timeout_s)
            case Update(version=version):
                return await self._ranks("tensorhub_update", version=version, timeout_s=self._timeout_s)
            case Stage(version=version):
                return await self._stage(version)
            case Install():
                return await self._ranks("tensorhub_install", timeout_s=self._timeout_s)
            case Discard():
                await self._ranks("tensorhub_discard")
            case Process():
                return await self._ranks("tensorhub_process")
            case ResetCaches():
                await engine.reset_mm_cache()
                await engine.reset_encoder_cache()
                return await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            case Publish():
                return await self._ranks("tensorhub_publish")
            case SetVersion(version=version):
                await engine.update_weight_version(str(version))
            case Resume():
                await engine.resume_generation()
        return None

    async def _stage(self, version: int | Literal["latest"]) -> list[ShardReport]:
        """Have every rank stage a version; asks them between two steps of the model until all have it."""
        reports = await self._ranks("tensorhub_stage", version=version, timeout_s=self._timeout_s)
        if not all(report.ok for report in reports):
            return reports
        until_s, pause_s = time.monotonic() + self._timeout_s + _LATE_S, _FIRST_LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            replies = await self._engine.collective_rpc("tensorhub_staged")
            if not any(reply.get("running") for reply in replies):
                return [report_of(reply) for reply in replies]
            if time.monotonic() > until_s:
                raise DeadlineExceeded(f"version {version} was not staged within {self._timeout_s:g} s")
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    async def _ranks(self, method: str, **arguments: Any) -> list[ShardReport]:
        return [report_of(reply) for reply in await self._engine.collective_rpc(method, kwargs=arguments)]

    # --- following --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        await drive_async(Follower().steps(lambda: self.status), self._perform_follow)

    async def _perform_follow(self, step: FollowStep) -> Any:
        match step:
            case WaitNewer(newer_than=newer_than):
                return await self._wait_newer(newer_than)
            case SwapTo():
                return await self.swap("latest", self.config.mode)
            case Sleep(seconds=seconds):
                await asyncio.sleep(seconds)
        return None

    async def _wait_newer(self, newer_than: VersionKey | None) -> VersionKey | None:
        """Return the key of a newer version, or None after a while."""
        assert self._observer is not None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()

        def answer(reply: Reply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(reply))

        withdraw = self._observer.submit_wait(newer_than, answer)
        try:
            reply = await asyncio.wait_for(future, _WAIT_S)
        except asyncio.TimeoutError:
            withdraw()
            return None
        except asyncio.CancelledError:
            withdraw()
            raise
        if not isinstance(reply, Available):
            raise StateError(f"the hub answered a wait with {reply}")
        return (reply.epoch, reply.number)


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("the engine no longer follows the hub", exc_info=task.exception())


class TensorHubRoutes:
    """The endpoint plugin."""

    name = BACKEND
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add the two routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take over the engine if it gets its weights from a hub; raises ConfigError for what cannot be followed."""
        state.tensorhub = None
        if engine_client is None or getattr(args, "weight_source", "disk") != BACKEND:
            return
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise ConfigError("--weight-source tensorhub works with --api-server-count 1: one process has to swap")
        front = EngineFront(engine_client, getattr(args, "weight_source_config", None) or WeightSourceConfig())
        await front.start()
        state.tensorhub = front


def make_plugin() -> TensorHubRoutes:
    """Return the endpoint plugin; vLLM calls this once for a server."""
    return TensorHubRoutes()


router = APIRouter()


@router.get("/tensorhub/version")
async def get_version(request: Request) -> JSONResponse:
    """Say which version every shard serves, where it came from, and how the last swap went."""
    front = request.app.state.tensorhub
    if front is None:
        return _not_ours()
    return JSONResponse(front.status.as_json())


@router.post("/tensorhub/update")
async def post_update(request: Request, body: dict[str, Any] = Body(default={})) -> JSONResponse:  # noqa: B008
    """Swap to a version; 200 only when every shard is proven to serve it."""
    front = request.app.state.tensorhub
    if front is None:
        return _not_ours()
    try:
        unknown = sorted(set(body) - {"version", "mode"})
        if unknown:
            raise ConfigError(f"unknown key {unknown[0]!r}: the body has version and mode")
        version = check_version(body.get("version", "latest"))
        mode = check_mode(body.get("mode", front.config.mode))
        outcome = await front.swap(version, mode)
    except (ConfigError, DeadlineExceeded, StateError) as error:
        return JSONResponse({**front.status.as_json(), "error": str(error)}, http_status(error.code))
    answer = front.status.as_json()
    if not outcome.ok:
        answer["error"] = outcome.message
    return JSONResponse(answer, http_status(outcome.code))


def _not_ours() -> JSONResponse:
    return JSONResponse({"error": "this server was not started with --weight-source tensorhub"}, 409)
