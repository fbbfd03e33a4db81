"""An SGLang engine that belongs to a hub: put together in its main process when SGLang makes its TokenizerManager."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from tensorhub_core.engine.config import WeightSourceConfig
from tensorhub_core.engine.front import EngineFront
from tensorhub_core.errors import StateError
from tensorhub_core.settings import load_settings
from tensorhub_sglang import compat_server
from tensorhub_sglang.compat_server import Manager
from tensorhub_sglang.guard import Guard
from tensorhub_sglang.server import SGLangEngine, logger

ATTRIBUTE = "tensorhub"
"""Under which a TokenizerManager keeps its `Managed`."""
_LEAVE_S = 10.0
"""How long an engine that ends waits for those who still read from it."""


class Managed:
    """One engine, its front and its guard. All coroutines belong to the event loop that serves its requests.

    No request runs before the front has started: until then it does not know whether the ranks agree.
    """

    def __init__(self, manager: Manager, config: WeightSourceConfig, engine: SGLangEngine | None = None) -> None:
        """Take over a TokenizerManager that has sent nothing yet."""
        timeout_s = config.timeout_s or load_settings().client.call_timeout_s
        self.engine = engine or SGLangEngine(manager, timeout_s)
        self.front = EngineFront(self.engine, config, logger)
        self.serves = False
        """It is an HTTP server, whose event loop always runs: only such an engine follows by itself."""
        self.failure: str | None = None
        """Why the engine must not serve."""
        self._manager = manager
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        Guard(self.engine, self.front).install()
        self._generate = manager.raw.generate_request
        manager.raw.generate_request = self._generate_when_started
        manager.on_sigterm(self.end)

    async def start(self) -> None:
        """Ask the ranks what they hold and begin to follow, once; raises StateError with the reason if that failed."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        if not self.serves:
            self.front.config = dataclasses.replace(self.front.config, follow=False)
        try:
            await self.front.start()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            logger.error("the engine does not serve, because it cannot be kept up to date: %s", self.failure)
            raise StateError(f"the engine cannot be kept up to date: {self.failure}") from error
        self._manager.raw.generate_request = self._generate

    async def _generate_when_started(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        await self.start()
        async with contextlib.aclosing(self._generate(obj, request)) as answers:
            async for answer in answers:
                yield answer

    async def end(self) -> None:
        """Leave the hub, once and bounded, and let go of requests that would wait for ever; never raises."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        try:
            await asyncio.wait_for(self.front.leave(), _LEAVE_S)
        except Exception as error:
            logger.warning("the engine ends without having left the hub: %s", error or type(error).__name__)
        with contextlib.suppress(Exception):
            await self.engine.end_held()


def install(
    config_of: Callable[[Any], WeightSourceConfig | None], handle: Callable[..., list[str]], shard: str
) -> None:
    """Register everything that concerns the server; to be called by the plug-in in each of SGLang's processes.

    `config_of` returns the config for a `ServerArgs`, None if the engine does not belong to a hub. `handle` is
    `rank.handle`; `shard`: the attribute under which a model keeps its EngineShard.
    """
    compat_server.hook_schedulers(handle, lambda server_args: config_of(server_args) is not None, shard)
    compat_server.hook_manager(functools.partial(_attach, config_of))


def managed(manager: Any) -> Managed:
    """Return what belongs to a TokenizerManager; raises StateError if its engine was not started from a hub."""
    found = getattr(manager, ATTRIBUTE, None)
    if not isinstance(found, Managed):
        raise StateError("this engine was not started with --weight-source tensorhub")
    return found


def _attach(config_of: Callable[[Any], WeightSourceConfig | None], manager: Any, server_args: Any) -> None:
    config = config_of(server_args)
    if config is None or hasattr(manager, ATTRIBUTE):
        return
    taken = Managed(Manager(manager), config)
    setattr(manager, ATTRIBUTE, taken)
    from tensorhub_sglang.http import serve

    compat_server.around_http(functools.partial(serve, taken))
    compat_server.before_shutdown(manager, taken.end)
