"""An engine's front: the one place that swaps its weights, follows the hub and answers for both; without a web server.

An adapter supplies what its engine does (`Engine`); which step comes when is decided by `swap` and `follow`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from tensorhub_core.client.observer import Observer, observe
from tensorhub_core.engine.calls import OPTION, RankReply, report_of
from tensorhub_core.engine.config import WeightSourceConfig, check_mode, check_version
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
    SwapMode,
    SwapOutcome,
    Update,
    Withdraw,
    drive_async,
    http_status,
)
from tensorhub_core.engine.swap import Swapper
from tensorhub_core.errors import ConfigError, DeadlineExceeded, StateError
from tensorhub_core.ids import VersionKey
from tensorhub_core.settings import load_settings
from tensorhub_core.state.messages import Available, Reply

_WAIT_S = 30.0
"""How long the follow loop waits before it looks at the engine's status again."""
_LATE_S = 5.0
"""How much later than its own deadline a rank's report may come."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.1
"""How long to wait between two looks at what is being staged: each one comes between two steps of the model."""


class Engine(Protocol):
    """What a running engine does for its front, on the event loop that serves its requests."""

    async def ranks(self, call: str, **arguments: Any) -> list[RankReply]:
        """Have every rank answer a call of `calls.CALLS` between two steps of the model; one reply a rank, in order."""

    async def pause(self, mode: SwapMode) -> None:
        """Stop generation; raises StateError if the mode cannot be had now, and then nothing has stopped."""

    async def reset_caches(self) -> bool:
        """Forget all that was computed with old weights; True only if every rank is known to have done it."""

    async def set_version(self, version: int) -> None:
        """Have answers from now on name this version."""

    async def resume(self) -> None:
        """Go on with generation, whatever mode it was paused in; nothing if it was not."""


class EngineFront:
    """Swap a running engine's weights. All methods belong to one event loop."""

    def __init__(self, engine: Engine, config: WeightSourceConfig, log: logging.Logger) -> None:
        """Take over an engine whose ranks were started from a hub."""
        self.config = config
        self._engine, self._log = engine, log
        self._observer: Observer | None = None
        self._lock = asyncio.Lock()
        self._timeout_s = config.timeout_s or load_settings().client.call_timeout_s
        self._swapper = Swapper(EngineStatus(config.model, config.replica or ""), time.monotonic, config.staged)
        self._following: asyncio.Task[None] | None = None
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def status(self) -> EngineStatus:
        """Return what the engine serves."""
        return self._swapper.status

    @property
    def timeout_s(self) -> float:
        """Return how long a swap may take in each of its parts."""
        return self._timeout_s

    async def start(self) -> None:
        """Ask the ranks what they loaded, name its version and begin to follow; raises if the ranks disagree."""
        replies = await self._engine.ranks("describe")
        self._swapper.status = EngineStatus(self.config.model, str(replies[0].get("replica", "")))
        self._swapper.started([report_of(reply) for reply in replies])
        self._observer = await asyncio.to_thread(
            observe, self.config.server, model=self.config.model, zone=self.config.zone
        )
        assert self.status.version is not None
        await self._engine.set_version(self.status.version)
        if self.config.follow and self.config.version == "latest":
            self._following = asyncio.create_task(self._follow(), name="tensorhub-follow")
            self._following.add_done_callback(self._log_end)

    async def leave(self) -> None:
        """Stop following and let every rank leave the hub, so that nobody is sent to an engine that ends."""
        if self._following is not None:
            self._following.cancel()
        async with self._lock:
            await self._engine.ranks("leave")
        if self._observer is not None:
            await asyncio.to_thread(self._observer.close)

    async def swap(self, version: int | Literal["latest"], mode: SwapMode) -> SwapOutcome:
        """Carry out one swap; a second one waits for the first.

        Raises DeadlineExceeded if that takes too long, StateError while the engine's memory is released.
        """
        # A client that hangs up must not leave the engine half swapped.
        return await asyncio.shield(asyncio.create_task(self._swap(version, mode)))

    async def sleep(self) -> None:
        """Take every rank's copy back before the engine's memory is released; the engine serves nothing until `wake`.

        Pauses generation as a swap by `abort` does. Raises StateError if a rank could not let go of its copy: then the
        memory must not be released.
        """
        await asyncio.shield(asyncio.create_task(self._sleep()))

    async def wake(self) -> SwapOutcome:
        """Fill the memory again, with the newest version, and go on serving; to be called after it was made anew."""
        self._awake.set()
        return await self.swap("latest" if self.config.version == "latest" else self._wanted(), self.config.mode)

    # --- how --------------------------------------------------------------------------------------------------------

    def _wanted(self) -> int | Literal["latest"]:
        return check_version(self.config.version)

    async def _sleep(self) -> None:
        async with self._turn():
            await drive_async(self._swapper.release(), self._perform)
            if self.status.code:
                raise StateError(f"the memory must not be released: {self.status.error}")
            self._awake.clear()

    @contextlib.asynccontextmanager
    async def _turn(self) -> Any:
        try:
            await asyncio.wait_for(self._lock.acquire(), self._timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"another swap has been running for {self._timeout_s:g} s") from None
        try:
            yield
        finally:
            self._lock.release()

    async def _swap(self, version: int | Literal["latest"], mode: SwapMode) -> SwapOutcome:
        async with self._turn():
            if not self._awake.is_set():
                raise StateError("the engine's memory is released: resume it first")
            outcome = await drive_async(self._swapper.swap(version, mode), self._perform)
        times = self.status.last_swap
        if outcome.ok and outcome.changed and times is not None:
            self._log.info(
                "swapped to version %s from %s (drain %.3f s, transfer %.3f s, process %.3f s, total %.3f s)",
                outcome.version,
                ", ".join(sorted({report.source or "?" for report in self.status.shards})),
                times.drain_s,
                times.transfer_s,
                times.process_s,
                times.total_s,
            )
        elif not outcome.ok:
            self._log.warning("swap to %s failed, %s: %s", version, self.status.state, outcome.message)
        return outcome

    async def _perform(self, step: Step) -> Any:
        engine = self._engine
        match step:
            case Look(version=version):
                assert self._observer is not None
                number = None if version == "latest" else version
                return (await asyncio.to_thread(self._observer.find, number)).key
            case Pause(mode=mode):
                await self._pause(mode)
            case Update(version=version):
                return await self._ranks("update", version=version, timeout_s=self._timeout_s)
            case Stage(version=version):
                return await self._stage(version)
            case Install():
                return await self._ranks("install", timeout_s=self._timeout_s)
            case Discard():
                await self._ranks("discard")
            case Process():
                return await self._ranks("process")
            case ResetCaches():
                return await engine.reset_caches()
            case Publish():
                return await self._ranks("publish")
            case Withdraw():
                return await self._ranks("withdraw", timeout_s=self._timeout_s)
            case SetVersion(version=version):
                await engine.set_version(version)
            case Resume():
                await engine.resume()
        return None

    async def _pause(self, mode: SwapMode) -> None:
        try:
            await asyncio.wait_for(self._engine.pause(mode), self._timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"generation did not stop within {self._timeout_s:g} s") from None

    async def _stage(self, version: int | Literal["latest"]) -> list[ShardReport]:
        """Have every rank stage a version; asks them between two steps of the model until all have it."""
        reports = await self._ranks("stage", version=version, timeout_s=self._timeout_s)
        if not all(report.ok for report in reports):
            return reports
        until_s, pause_s = time.monotonic() + self._timeout_s + _LATE_S, _FIRST_LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            replies = await self._engine.ranks("staged")
            if not any(reply.get("running") for reply in replies):
                return [report_of(reply) for reply in replies]
            if time.monotonic() > until_s:
                raise DeadlineExceeded(f"version {version} was not staged within {self._timeout_s:g} s")
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    async def _ranks(self, call: str, **arguments: Any) -> list[ShardReport]:
        return [report_of(reply) for reply in await self._engine.ranks(call, **arguments)]

    # --- following --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        await drive_async(Follower().steps(lambda: self.status), self._perform_follow)

    async def _perform_follow(self, step: FollowStep) -> Any:
        match step:
            case WaitNewer(newer_than=newer_than):
                return await self._wait_newer(newer_than)
            case SwapTo():
                await self._awake.wait()  # or it would back off, and be late for what comes after the sleep
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

    def _log_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._log.error("the engine no longer follows the hub", exc_info=task.exception())


def answer_version(front: EngineFront | None) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and body of `GET /tensorhub/version`; `front` is None where there is none."""
    return (200, front.status.as_json()) if front is not None else _not_ours()


async def answer_update(front: EngineFront | None, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Carry out `POST /tensorhub/update`; 200 only when every shard is proven to serve the version."""
    if front is None:
        return _not_ours()
    try:
        unknown = sorted(set(body) - {"version", "mode"})
        if unknown:
            raise ConfigError(f"unknown key {unknown[0]!r}: the body has version and mode")
        version = check_version(body.get("version", "latest"))
        outcome = await front.swap(version, check_mode(body.get("mode", front.config.mode)))
    except (ConfigError, DeadlineExceeded, StateError) as error:
        return http_status(error.code), {**front.status.as_json(), "error": str(error)}
    answer = front.status.as_json()
    if not outcome.ok:
        answer["error"] = outcome.message
    return http_status(outcome.code), answer


def _not_ours() -> tuple[int, dict[str, Any]]:
    return 409, {"error": f"this server was not started with {OPTION}"}
