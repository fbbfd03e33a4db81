"""Swap the weights of an in-process `sglang.Engine` by hand: the same transaction as the server's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from tensorhub_core.engine.steps import EngineStatus, SwapMode, SwapOutcome
from tensorhub_core.errors import StateError
from tensorhub_sglang.managed import managed

T = TypeVar("T")


class OfflineEngine:
    """Swap versions into an `sglang.Engine` that was started from a hub. The thread that calls `generate`.

    The engine swaps when told, whatever `follow` says: between two calls its event loop stands still. Inside a running
    event loop use `aswap`.
    """

    def __init__(self, engine: Any) -> None:
        """Take an engine; raises StateError if it was not started from a hub, or if its ranks disagree."""
        self._engine, self._managed = engine, managed(engine.tokenizer_manager)
        if not engine.loop.is_running():
            self._run(self._managed.start())

    @property
    def status(self) -> EngineStatus:
        """Return what the engine serves."""
        return self._managed.front.status

    def swap(self, version: int | Literal["latest"] = "latest", mode: SwapMode | None = None) -> SwapOutcome:
        """Bring all ranks to a version; the outcome says whether they are proven to serve it."""
        return self._run(self.aswap(version, mode))

    async def aswap(self, version: int | Literal["latest"] = "latest", mode: SwapMode | None = None) -> SwapOutcome:
        """Do as `swap` does, on the engine's own event loop while it runs."""
        await self._managed.start()
        return await self._managed.front.swap(version, mode or self._managed.front.config.mode)

    def leave(self) -> None:
        """Leave the hub; the engine goes on with the weights that it has. `Engine.shutdown` does it too."""
        self._run(self._managed.end())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        loop: asyncio.AbstractEventLoop = self._engine.loop
        if loop.is_running():
            work.close()
            raise StateError("the engine's event loop is running: use `await engine.aswap()`")
        return loop.run_until_complete(work)
