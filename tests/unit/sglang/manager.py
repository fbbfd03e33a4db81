"""A TokenizerManager as the adapter sees it, with made-up ranks behind it: SGLang is not installed here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from tensorhub_sglang.compat_server import CHANGES_WEIGHTS, Manager


class ReadWriteLock:
    """As SGLang's: a writer that waits holds readers back, and one that gives up wakes nobody."""

    def __init__(self) -> None:
        self._cond = asyncio.Condition()
        self.readers, self.writing, self.waiting = 0, False, 0

    async def acquire_reader(self) -> None:
        async with self._cond:
            while self.writing or self.waiting:
                await self._cond.wait()
            self.readers += 1

    async def release_reader(self) -> None:
        async with self._cond:
            self.readers -= 1
            if self.readers == 0:
                self._cond.notify_all()

    async def acquire_writer(self) -> None:
        async with self._cond:
            self.waiting += 1
            try:
                while self.writing or self.readers:
                    await self._cond.wait()
                self.writing = True
            finally:
                self.waiting -= 1

    async def release_writer(self) -> None:
        async with self._cond:
            self.writing = False
            self._cond.notify_all()


class Received(SimpleNamespace):
    """The message that answers a call."""


class FakeManager:
    """`log` has what reached the schedulers, in order. `answers(call, arguments)` gives the ranks' replies, or None."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.answers: Callable[[str, dict[str, Any]], list[dict[str, Any]] | None] = lambda call, arguments: [
            {"ok": True}
        ]
        self.is_pause, self.is_pause_cond = False, asyncio.Condition()
        self.model_update_lock = ReadWriteLock()
        self.rid_to_state: dict[str, Any] = {}
        self.aborts: list[asyncio.Event] = []
        self.weight_version = "default"
        self.last_receive_tstamp = 0.0
        self.take: Callable[[Any], None] = lambda message: None
        self.numbers: list[int] = []
        self.event_loop = None
        for name in CHANGES_WEIGHTS:
            setattr(self, name, None)
        self.signal_handler_class = Handler

    # --- what the adapter calls --------------------------------------------------------------------------------------

    def auto_create_handle_loop(self) -> None:
        pass

    def _dispatch_to_scheduler(self, message: Any) -> None:
        number, call, arguments = message
        self.log.append((call, arguments) if arguments else call)
        self.numbers.append(number)
        replies = self.answers(call, arguments)
        if replies is not None:
            texts = [json.dumps(reply) for reply in replies]
            asyncio.get_running_loop().call_soon(lambda: self.take(Received(number=number, replies=texts)))

    def _update_weight_version_if_provided(self, version: str) -> None:
        self.weight_version = version

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.log.append("abort")
        for event in self.aborts:
            event.set()

    async def pause_generation(self, order: Any) -> None:
        async with self.is_pause_cond:
            self.is_pause = True
            self.log.append(f"stop {order.mode}")

    async def continue_generation(self, order: Any) -> None:
        async with self.is_pause_cond:
            self.is_pause = False
            self.log.append("go on")
            self.is_pause_cond.notify_all()

    async def check_weights(self, obj: Any, request: Any = None) -> Any:
        self.log.append(f"check {obj.action}")
        return True, "", None, None

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        self.log.append(("release", sorted(obj.tags)))

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        self.log.append(("resume", obj.tags and sorted(obj.tags)))

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        for k in range(obj):
            yield k

    # --- what tests call ---------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def request(self, rid: str = "r") -> AsyncIterator[None]:
        """Be a request: held back while paused, then running for as long as the block."""
        self.rid_to_state[rid] = None
        try:
            async with self.is_pause_cond:
                await self.is_pause_cond.wait_for(lambda: not self.is_pause)
            await self.model_update_lock.acquire_reader()
            try:
                self.log.append(f"{rid} runs")
                yield
            finally:
                await self.model_update_lock.release_reader()
        finally:
            del self.rid_to_state[rid]

    async def run_request(self, rid: str, until: asyncio.Event) -> None:
        """Run a request until the event."""
        async with self.request(rid):
            await until.wait()


class Handler:
    """SGLang's handler of signals."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager

    def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
        self.manager.log.append("SIGTERM")


class OurManager(Manager):
    """Receives without SGLang's dispatcher."""

    raw: FakeManager

    def receive(self, kind: type, take: Callable[[Any], None]) -> None:
        self.raw.take = take


def wrapped(fake: FakeManager) -> OurManager:
    """Wrap a fake as the adapter does a real one."""

    def order(**fields: Any) -> Any:
        return SimpleNamespace(**fields)

    return OurManager(fake, SimpleNamespace(PauseGenerationReqInput=order, ContinueGenerationReqInput=order))


async def soon(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until a condition holds."""
    until_s = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < until_s, "it did not come to that"
        await asyncio.sleep(0.005)
