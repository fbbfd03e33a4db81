"""The HTTP side: `GET /tensorhub/version`, `POST /tensorhub/update`, and SGLang's manner of asking for the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorhub_core.engine.config import check_version
from tensorhub_core.engine.front import EngineFront, answer_update, answer_version
from tensorhub_core.engine.steps import SwapMode, http_status
from tensorhub_core.errors import ConfigError, TensorHubError
from tensorhub_sglang import compat_server
from tensorhub_sglang.managed import Managed

UPDATE_MODES: dict[str, SwapMode] = {"retract": "keep", "in_place": "in_place", "abort": "abort", "wait": "wait"}
"""SGLang's names of what a swap does with running requests, and ours."""


def serve(managed: Managed, run: Callable[[], Any], app: Any) -> Any:
    """Run SGLang's HTTP server with our routes; its front starts before the first request is taken.

    Raises SystemExit with the reason if the front cannot start: weights that nobody manages are not served.
    """
    managed.serves = True
    add_routes(app, managed.front)
    with compat_server.lifespan_around(app, managed.start, managed.end):
        result = run()
    if managed.failure is not None:
        raise SystemExit(f"--weight-source tensorhub: {managed.failure}")
    return result


def add_routes(app: Any, front: EngineFront) -> None:
    """Add the routes to a FastAPI app, and answer the hub's errors in SGLang's own routes as its refusals."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def get_version() -> JSONResponse:
        """Say which version every shard serves, where it came from, and how the last swap went."""
        status, body = answer_version(front)
        return JSONResponse(body, status)

    async def post_update(request: Request) -> JSONResponse:
        """Swap to a version; 200 only when every shard is proven to serve it."""
        try:
            given = _object(await request.body())
        except ConfigError as error:
            return JSONResponse({**front.status.as_json(), "error": str(error)}, http_status(error.code))
        status, body = await answer_update(front, given)
        return JSONResponse(body, status)

    async def post_update_weights(request: Request) -> JSONResponse:
        """Swap to a version as SGLang's own update_weights_from_* do."""
        try:
            given = _object(await request.body())
        except ConfigError as error:
            return JSONResponse({"success": False, "message": str(error)}, http_status(error.code))
        status, body = await answer_update_weights(front, given)
        return JSONResponse(body, status)

    async def refused(request: Request, error: Any) -> JSONResponse:
        """Answer a call of SGLang's own that the hub keeps from being carried out."""
        return JSONResponse({"success": False, "message": str(error)}, http_status(error.code))

    for endpoint in (post_update, post_update_weights, refused):
        endpoint.__annotations__["request"] = Request  # FastAPI reads them, and they are text here
    app.add_api_route("/tensorhub/version", get_version, methods=["GET"], response_model=None)
    for path, endpoint in (
        ("/tensorhub/update", post_update),
        ("/update_weights_from_tensorhub", post_update_weights),
    ):
        app.add_api_route(path, compat_server.only_admin(endpoint), methods=["POST"], response_model=None)
    app.add_exception_handler(TensorHubError, refused)


async def answer_update_weights(front: EngineFront, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Carry out `POST /update_weights_from_tensorhub`; `success` only when every shard is proven swapped."""
    try:
        unknown = sorted(set(body) - {"version", "mode"})
        if unknown:
            raise ConfigError(f"unknown key {unknown[0]!r}: the body has version and mode")
        version = check_version(body.get("version", "latest"))
        mode = body.get("mode")
        if mode is not None and (not isinstance(mode, str) or mode not in UPDATE_MODES):
            raise ConfigError(f"mode must be one of {', '.join(UPDATE_MODES)}, not {mode!r}")
        outcome = await front.swap(version, front.config.mode if mode is None else UPDATE_MODES[mode])
    except TensorHubError as error:
        return http_status(error.code), {"success": False, "message": str(error)}
    if not outcome.ok:
        return http_status(outcome.code), {"success": False, "message": outcome.message}
    said = "Succeeded to update model weights to" if outcome.changed else "The engine served already"
    return 200, {"success": True, "message": f"{said} version {outcome.version}."}


def _object(body: bytes) -> dict[str, Any]:
    import json

    try:
        given = json.loads(body) if body.strip() else {}
    except ValueError as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"the body must be a JSON object, not {type(given).__name__}")
    return given
