"""The engine's HTTP side: `GET /tensorhub/version`, `POST /tensorhub/update`, and what the front asks of vLLM."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse
from vllm.logger import init_logger

from tensorhub_core.engine.calls import RankReply
from tensorhub_core.engine.config import WeightSourceConfig
from tensorhub_core.engine.front import EngineFront, answer_update, answer_version
from tensorhub_core.engine.steps import SwapMode
from tensorhub_core.errors import ConfigError, StateError
from tensorhub_vllm import BACKEND, compat

logger = init_logger("vllm.tensorhub.http")
_LEAVE_S = 10.0
"""How long an engine that ends waits for those who still read from it."""


class ServedEngine:
    """Core's `Engine` over vLLM's asynchronous engine client."""

    def __init__(self, engine: Any) -> None:
        """Wrap the client of the API server's process."""
        self._engine = engine

    async def ranks(self, call: str, **arguments: Any) -> list[RankReply]:
        """Ask all workers between two steps of the model."""
        replies: list[RankReply] = await self._engine.collective_rpc("tensorhub", args=(call, arguments))
        return replies

    async def pause(self, mode: SwapMode) -> None:
        """Stop generation; what was computed is forgotten."""
        if mode == "in_place":
            raise StateError("vLLM computes running requests anew: use keep")
        await self._engine.pause_generation(mode=mode, clear_cache=True)

    async def reset_caches(self) -> bool:
        """Reset the prefix cache, also that of running requests, and what else holds results of old weights."""
        await self._engine.reset_mm_cache()
        await self._engine.reset_encoder_cache()
        return bool(await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    async def set_version(self, version: int) -> None:
        """Have completions name the version."""
        await self._engine.update_weight_version(str(version))

    async def resume(self) -> None:
        """Go on with generation."""
        await self._engine.resume_generation()


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
        config = getattr(args, "weight_source_config", None) or WeightSourceConfig()
        front = EngineFront(ServedEngine(engine_client), config, logger)
        await front.start()
        compat.before_shutdown(engine_client, front.leave, _LEAVE_S)
        state.tensorhub = front


def make_plugin() -> TensorHubRoutes:
    """Return the endpoint plugin; vLLM calls this once for a server."""
    return TensorHubRoutes()


router = APIRouter()


@router.get("/tensorhub/version")
async def get_version(request: Request) -> JSONResponse:
    """Say which version every shard serves, where it came from, and how the last swap went."""
    status, body = answer_version(request.app.state.tensorhub)
    return JSONResponse(body, status)


@router.post("/tensorhub/update")
async def post_update(request: Request, body: dict[str, Any] = Body(default={})) -> JSONResponse:  # noqa: B008
    """Swap to a version; 200 only when every shard is proven to serve it."""
    status, answer = await answer_update(request.app.state.tensorhub, body)
    return JSONResponse(answer, status)
