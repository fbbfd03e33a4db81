"""A running SGLang engine as the hub's front sees it: stop it, flush it, name its version, let it go on."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Callable
from typing import Any

from tensorhub_core.engine.calls import RankReply
from tensorhub_core.engine.steps import SwapMode
from tensorhub_core.errors import DeadlineExceeded, StateError
from tensorhub_sglang import compat_server
from tensorhub_sglang.compat_server import Manager

logger = logging.getLogger("sglang.tensorhub")
_LATE_S = 5.0
"""How much later than its own deadline a rank's reply may come."""
_HEARD_S = 2.0
"""How often SGLang is told that an engine which carries out a call of ours is alive."""
_FLUSH_S = 10.0
"""How long requests that are being prepared may keep the cache from being flushed."""
_FLUSH_EVERY_S = 0.05
_END_HELD_S = 5.0
_LONG = frozenset({"update", "install", "process", "publish", "withdraw", "leave"})
"""Calls that may keep the ranks from anything else for long."""
_NEEDED = frozenset({"weights", "kv_cache"})
"""The kinds of memory without which no request may run."""


class SGLangEngine:
    """Carry out a swap's steps on a TokenizerManager. All methods belong to the event loop that serves its requests.

    While it is held by `pause`, a caller's own `pause_generation` and `continue_generation` are remembered and take
    effect when it goes on: nobody can let a half-swapped engine run.
    """

    def __init__(
        self,
        manager: Manager,
        timeout_s: float,
        new_call: Callable[[int, str, dict[str, Any]], Any] = compat_server.new_call,
        replies_kind: type | None = None,
    ) -> None:
        """Take over an engine; `timeout_s` is how long its ranks may take for a call that names no time itself."""
        self.manager, self.timeout_s = manager, timeout_s
        self._new_call, self._numbers = new_call, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[list[str]]] = {}
        self._held = False
        self._free = asyncio.Event()
        self._free.set()
        self._callers_pause = False
        self._orders = asyncio.Lock()
        self.released: frozenset[str] = frozenset()
        """Which kinds of memory SGLang has released."""
        manager.receive(replies_kind or compat_server.replies_kind(), self._take)

    @property
    def held(self) -> bool:
        """Tell whether a swap keeps the engine paused."""
        return self._held

    # --- calls to the ranks -----------------------------------------------------------------------------------------

    async def ranks(self, call: str, **arguments: Any) -> list[RankReply]:
        """Have every rank answer a call between two steps of the model; raises DeadlineExceeded."""
        timeout_s = float(arguments.get("timeout_s") or self.timeout_s) + _LATE_S
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.manager.send(self._new_call(number, call, arguments))
            texts = await self._answered(future, timeout_s, call in _LONG)
        finally:
            del self._waiting[number]
        if texts is None:
            raise DeadlineExceeded(f"the engine's ranks did not answer {call!r} within {timeout_s:g} s")
        return [json.loads(text) for text in texts]

    async def _answered(self, future: asyncio.Future[list[str]], timeout_s: float, long: bool) -> list[str] | None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while (left_s := until_s - loop.time()) > 0:
            done, _ = await asyncio.wait({future}, timeout=min(left_s, _HEARD_S))
            if done:
                return future.result()
            if long:
                self.manager.heard()
        return None

    def _take(self, message: Any) -> None:
        """Give an answer to whom asked for it; one that comes too late belongs to nobody."""
        future = self._waiting.get(message.number)
        if future is not None and not future.done():
            future.set_result(message.replies)

    # --- the steps of a swap ----------------------------------------------------------------------------------------

    async def pause(self, mode: SwapMode) -> None:
        """Stop generation and prove that the cache can be flushed then, before any weight is touched.

        `wait` lets the requests that run finish, `abort` ends them, `keep` puts them back in line, where they are
        computed anew. `in_place` leaves them as they are; SGLang keeps their cached keys and values then, so it can be
        had only while none runs. New requests wait in every mode. An engine that a caller has paused stays so
        afterwards, and `wait` does not wait for its requests. Raises StateError if the cache cannot be flushed.
        """
        if self._held:
            return
        async with self._orders:
            self._callers_pause = self.manager.paused
            self._held = True
            self._free.clear()
        try:
            await self._stop(mode)
            if not await self.reset_caches():
                raise StateError(
                    f"requests are running that mode {mode!r} keeps with what was computed for them: swap between "
                    "requests, or by another mode"
                )
        except BaseException:
            await self._let_go()
            raise

    async def _stop(self, mode: SwapMode) -> None:
        manager = self.manager
        if self._callers_pause:
            if mode == "abort":
                manager.abort_all()
            if mode in ("abort", "keep"):
                await manager.stop("retract")
        elif mode in ("wait", "abort"):
            async with manager.no_requests(abort=mode == "abort"):
                await manager.stop("retract")
        else:
            await manager.stop("retract" if mode == "keep" else "in_place")

    async def reset_caches(self) -> bool:
        """Flush every rank's cache; True only if each one says that it did."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _FLUSH_S
        while True:
            replies = await self.ranks("flush")
            if replies and all(reply.get("ok") for reply in replies):
                self.manager.forget_inputs()
                return True
            if any(reply.get("busy", True) for reply in replies) or loop.time() > until_s:
                logger.warning("the cache was not flushed: %s", "; ".join(_said(replies)))
                return False
            await asyncio.sleep(_FLUSH_EVERY_S)

    async def set_version(self, version: int) -> None:
        """Have answers from now on name this version: SGLang's `weight_version` and `weight_versions`."""
        replies = await self.ranks("set_version", version=str(version))
        if not replies or not all(reply.get("ok") for reply in replies):
            raise StateError(f"version {version} could not be named: {'; '.join(_said(replies))}")
        self.manager.name_version(str(version))

    async def resume(self) -> None:
        """Go on with generation, unless a caller paused it or SGLang's memory is still released: then later."""
        if self._held and not self.released & _NEEDED:
            await self._let_go()

    async def _let_go(self) -> None:
        # Also while a deadline cancels the swap: an engine that nobody lets go would hold its requests for ever.
        await asyncio.shield(asyncio.ensure_future(self._go_on()))

    async def _go_on(self) -> None:
        async with self._orders:
            if not self._callers_pause:
                await self.manager.go_on()
            self._held = False
            self._free.set()

    # --- what callers order -----------------------------------------------------------------------------------------

    async def callers_pause(self, order: Any) -> None:
        """Carry out a caller's `pause_generation`; while a swap holds the engine it stays paused after the swap."""
        async with self._orders:
            if not self._held:
                await self.manager.pause_by(order)
                return
            self._callers_pause = True
            if getattr(order, "mode", "") == "abort":
                self.manager.abort_all()

    async def callers_continue(self, order: Any, may_wait: Callable[[], bool]) -> None:
        """Carry out a caller's `continue_generation`; waits for a running swap.

        Raises StateError if the engine holds no whole version: `may_wait` tells whether a swap is going to end that.
        """
        async with self._orders:
            if not self._held:
                await self.manager.go_on(order)
                return
            if not may_wait():
                raise StateError("the engine holds no version it could serve: swap to one first")
            self._callers_pause = False
        try:
            await asyncio.wait_for(self._free.wait(), self.timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"a swap has held the engine for {self.timeout_s:g} s") from None

    async def end_held(self) -> None:
        """End the requests that a held engine keeps waiting, because it ends itself."""
        if self._held:
            await self.manager.end_held(_END_HELD_S)


def _said(replies: list[RankReply]) -> list[str]:
    return sorted({str(reply.get("message") or "?") for reply in replies if not reply.get("ok")}) or [
        "no rank answered"
    ]
