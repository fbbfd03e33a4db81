"""Everything the adapter knows about SGLang's server side: its TokenizerManager, its schedulers, its HTTP server.

Written against SGLang 0.5.23. Each function says what it relies on: a new release is checked from top to bottom.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

_ABORT_EVERY_S = 0.2
"""A request that was on its way to the scheduler when all were aborted is aborted by the next order."""

ALL_MEMORY = frozenset({"kv_cache", "weights", "cuda_graph"})
"""What `release_memory_occupation` without tags releases."""

CHANGES_WEIGHTS = (
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
    "init_weights_update_group",
)
"""TokenizerManager's calls that change weights and answer with (success, message)."""


class Manager:
    """A TokenizerManager as the swap sees it: hold requests back, let them go, speak to the schedulers.

    Relies on `pause_generation` and `continue_generation` (keep requests from the scheduler, tell it to stop at the
    next boundary), on `is_pause`, on `model_update_lock` (read-held by every request from before it is sent to its
    end), and on `_result_dispatcher`. All methods belong to the event loop that serves requests.
    """

    def __init__(self, manager: Any, requests: Any = None) -> None:
        """Wrap a TokenizerManager; `requests` has SGLang's request types, by default its io_struct."""
        self.raw = manager
        self._requests = requests or _io_struct()
        self._pause, self._continue = manager.pause_generation, manager.continue_generation

    @property
    def paused(self) -> bool:
        """Tell whether generation is paused, by anyone."""
        return bool(self.raw.is_pause)

    def send(self, message: Any) -> None:
        """Hand a message to all ranks' schedulers, after all that was sent before.

        Starts SGLang's loop of receiving, with which it also installs its signal handlers.
        """
        self.raw.auto_create_handle_loop()
        self.raw._dispatch_to_scheduler(message)

    def receive(self, kind: type, take: Callable[[Any], None]) -> None:
        """Have `take` called with every message of a kind that comes from the schedulers."""
        self.raw._result_dispatcher += _dispatcher([(kind, take)])

    def heard(self) -> None:
        """Keep SGLang's health check from taking an engine that is busy with a call of ours for a dead one."""
        self.raw.last_receive_tstamp = time.time()

    async def stop(self, mode: str) -> None:
        """Keep new requests back and stop the scheduler; `retract` puts requests that run back in line."""
        self.raw.auto_create_handle_loop()
        await self._pause(self._requests.PauseGenerationReqInput(mode=mode))

    async def pause_by(self, order: Any) -> None:
        """Carry out a caller's own order to pause, as SGLang does."""
        await self._pause(order)

    async def go_on(self, order: Any = None) -> None:
        """Let the scheduler run and requests through, by a caller's own order or without emptying CUDA's cache."""
        await self._continue(order or self._requests.ContinueGenerationReqInput(torch_empty_cache=False))

    @contextlib.asynccontextmanager
    async def no_requests(self, abort: bool) -> AsyncIterator[None]:
        """Wait until no request runs, and keep new ones back inside the block; `abort` ends those that run."""
        lock = self.raw.model_update_lock
        waiting = asyncio.ensure_future(lock.acquire_writer())
        try:
            done: set[Any] = set()
            while not done:
                if abort:
                    self.abort_all()
                done, _ = await asyncio.wait({waiting}, timeout=_ABORT_EVERY_S if abort else None)
            waiting.result()
        except BaseException:
            await _take_back(waiting, lock)
            raise
        try:
            yield
        finally:
            await lock.release_writer()

    def abort_all(self) -> None:
        """End all requests that the scheduler has."""
        self.raw.abort_request(abort_all=True)

    async def end_held(self, timeout_s: float) -> None:
        """End the requests that a paused engine holds back: they reach the stopped scheduler, and are aborted there."""
        until_s = time.monotonic() + timeout_s
        async with self.raw.is_pause_cond:
            self.raw.is_pause = False
            self.raw.is_pause_cond.notify_all()
        while self.raw.rid_to_state and time.monotonic() < until_s:
            self.abort_all()
            await asyncio.sleep(_ABORT_EVERY_S)

    def name_version(self, version: str) -> None:
        """Name the version in the answers' meta_info where the scheduler does not, and in /model_info."""
        self.raw._update_weight_version_if_provided(version)

    def forget_inputs(self) -> None:
        """Drop preprocessed images, as SGLang does after each of its own weight updates."""
        if getattr(self.raw, "mm_processor", None) is not None:
            self.raw.mm_processor.clear_preprocess_cache()

    def on_sigterm(self, then: Callable[[], Awaitable[None]]) -> None:
        """Have `then` run when SIGTERM comes; SGLang waits for running requests meanwhile, then ends its schedulers.

        Relies on `signal_handler_class` being read when the first request or call comes.
        """
        base = self.raw.signal_handler_class
        tasks: set[Any] = set()

        class Handler(base):  # type: ignore[misc, valid-type]
            def sigterm_handler(self, signum: Any = None, frame: Any = None) -> None:
                super().sigterm_handler(signum, frame)
                task = asyncio.ensure_future(then())
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        self.raw.signal_handler_class = Handler


async def _take_back(waiting: asyncio.Future[Any], lock: Any) -> None:
    """Stop waiting for the write side of SGLang's lock.

    Its own cancellation wakes none of the readers that were held back for this writer: wake them.
    """
    waiting.cancel()
    await asyncio.wait({waiting})
    if waiting.cancelled() or waiting.exception() is not None:
        async with lock._cond:
            lock._cond.notify_all()
    else:
        await lock.release_writer()


def new_call(number: int, call: str, arguments: dict[str, Any]) -> Any:
    """Return the message that asks every rank for a call."""
    from tensorhub_sglang.messages import TensorHubCall

    return TensorHubCall(number=number, call=call, arguments=json.dumps(arguments))


def replies_kind() -> type:
    """Return the type of the message that answers a call."""
    from tensorhub_sglang.messages import TensorHubReplies

    return TensorHubReplies


def hook_schedulers(handle: Callable[..., list[str]], wanted: Callable[[Any], bool], attribute: str) -> None:
    """Have every rank's scheduler carry out our calls by `handle`, if its arguments are `wanted`; before hooks apply.

    Relies on `Scheduler.init_request_dispatcher` making `_request_dispatcher`, on `tp_worker.model_runner.model`, and
    on the tensor-parallel CPU group (gloo).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tensorhub_sglang import messages

    def add(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        if not wanted(scheduler.server_args):
            return

        def carry_out(request: Any) -> Any:
            from sglang.srt.runtime_context import get_parallel

            parallel = get_parallel()
            shard = getattr(scheduler.tp_worker.model_runner.model, attribute, None)
            group, rank = parallel.tp_group.cpu_group, int(parallel.tp_rank)
            replies = handle(scheduler, request.call, request.arguments, shard, group, rank)
            return messages.TensorHubReplies(number=request.number, replies=replies)

        scheduler._request_dispatcher += _dispatcher([(messages.TensorHubCall, carry_out)])

    target = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
    HookRegistry.register(target, add, HookType.AFTER)


def hook_manager(attach: Callable[[Any, Any], None]) -> None:
    """Have `attach(tokenizer_manager, server_args)` run in the main process, before the ranks have loaded.

    What it raises keeps the engine from starting.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
        attach(manager, manager.server_args)

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"
    HookRegistry.register(target, after, HookType.AFTER)


def around_http(serve: Callable[[Callable[[], Any], Any], Any]) -> None:
    """Have `serve(run, app)` run this process's HTTP server, if it is going to have one; `run()` does it.

    To be called when the TokenizerManager is made. Relies on `_setup_and_run_http_server` of SGLang's http_server,
    which is loaded by then, blocking for as long as the server runs.
    """
    module = sys.modules.get("sglang.srt.entrypoints.http_server")
    if module is None:
        return
    original = module._setup_and_run_http_server

    @functools.wraps(original)
    def run_server(*args: Any, **kwargs: Any) -> Any:
        module._setup_and_run_http_server = original  # type: ignore[attr-defined]
        return serve(functools.partial(original, *args, **kwargs), module.app)

    module._setup_and_run_http_server = run_server  # type: ignore[attr-defined]


def before_shutdown(manager: Any, leave: Callable[[], Awaitable[None]]) -> None:
    """Have `leave` run before the `sglang.Engine` of this TokenizerManager kills its processes.

    Relies on `Engine.shutdown`, which SGLang has registered with `atexit` by then: what is registered later runs first.
    """
    module = sys.modules.get("sglang.srt.entrypoints.engine")
    if module is None:
        return
    original = module.Engine.shutdown

    def run_leave() -> None:
        with contextlib.suppress(Exception):  # the loop is closed, or runs
            loop = manager.event_loop or asyncio.get_event_loop_policy().get_event_loop()
            if not loop.is_running() and not loop.is_closed():
                loop.run_until_complete(leave())

    @functools.wraps(original)
    def shutdown(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.tokenizer_manager is manager:
            run_leave()
        return original(engine, *args, **kwargs)

    module.Engine.shutdown = shutdown
    atexit.register(run_leave)


@contextlib.contextmanager
def lifespan_around(
    app: Any, begin: Callable[[], Awaitable[None]], end: Callable[[], Awaitable[None]]
) -> Iterator[None]:
    """Have `begin` run before the app takes its first request or sends its own warm-up, and `end` at its end.

    Relies on Starlette's `router.lifespan_context`. What `begin` raises keeps the server from starting.
    """
    original = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(started: Any) -> AsyncIterator[Any]:
        await begin()
        try:
            async with original(started) as state:
                yield state
        finally:
            await end()

    app.router.lifespan_context = lifespan
    try:
        yield
    finally:
        app.router.lifespan_context = original


def only_admin(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Guard an endpoint like SGLang's own that change weights: by the admin key where there is one."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    marked: Callable[..., Any] = auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)
    return marked


def _io_struct() -> Any:
    from sglang.srt.managers import io_struct

    return io_struct


def _dispatcher(pairs: list[tuple[type, Callable[[Any], Any]]]) -> Any:
    from sglang.utils import TypeBasedDispatcher

    return TypeBasedDispatcher(pairs)
