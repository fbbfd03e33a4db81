"""`POST /update_weights_from_tensorhub`: SGLang's names of the modes, its shape of answers; and who may serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tensorhub_core.engine.config import weight_source_config
from tensorhub_core.engine.steps import SwapOutcome
from tensorhub_core.errors import ConfigError, StateError
from tensorhub_sglang import http
from tensorhub_sglang.http import answer_update_weights
from tensorhub_sglang.managed import Managed, managed
from tensorhub_sglang.server import SGLangEngine
from tests.unit.sglang.manager import FakeManager, Received, soon, wrapped

pytestmark = pytest.mark.timeout(30)


class Front:
    """A front that notes the swap it is asked for."""

    def __init__(self, outcome: SwapOutcome | Exception) -> None:
        self.config = weight_source_config({"mode": "abort"})
        self.outcome, self.asked = outcome, []  # type: ignore[var-annotated]

    async def swap(self, version: Any, mode: str) -> SwapOutcome:
        self.asked.append((version, mode))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def ask(front: Front, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Ask for an update as the route does."""
    return asyncio.run(answer_update_weights(front, body))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({}, ("latest", "abort")),
        ({"version": 3, "mode": "retract"}, (3, "keep")),
        ({"version": "4", "mode": "in_place"}, (4, "in_place")),
        ({"version": "latest", "mode": "wait"}, ("latest", "wait")),
        ({"mode": "abort"}, ("latest", "abort")),
    ],
)
def test_a_mode_is_named_as_sglang_names_it(body: dict[str, Any], asked: tuple[Any, str]) -> None:
    front = Front(SwapOutcome(3, True))
    status, answer = ask(front, body)
    assert (status, answer["success"], front.asked) == (200, True, [asked])
    assert answer["message"] == "Succeeded to update model weights to version 3."
    assert set(answer) == {"success", "message"}


def test_a_version_that_is_served_already_is_said_to_be() -> None:
    assert ask(Front(SwapOutcome(3, False)), {})[1] == {
        "success": True,
        "message": "The engine served already version 3.",
    }


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"mode": "keep"}, "retract"),
        ({"mode": ["retract"]}, "retract"),
        ({"version": -1}, "version must be"),
        ({"weight_version": "3"}, "weight_version"),
    ],
)
def test_what_makes_no_sense_reaches_no_engine(body: dict[str, Any], text: str) -> None:
    front = Front(SwapOutcome(3, True))
    status, answer = ask(front, body)
    assert (status, answer["success"], front.asked) == (400, False, [])
    assert text in answer["message"]


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (SwapOutcome(1, False, "version_unavailable", "nobody has it"), 404),
        (SwapOutcome(None, False, "corrupt_transfer", "bits"), 502),
        (SwapOutcome(1, False, "deadline_exceeded", "late"), 504),
        (StateError("asleep"), 409),
    ],
)
def test_a_failure_says_why(outcome: SwapOutcome | Exception, status: int) -> None:
    got, answer = ask(Front(outcome), {})
    text = str(outcome) if isinstance(outcome, Exception) else outcome.message
    assert (got, answer) == (status, {"success": False, "message": text})


@pytest.mark.parametrize("body", [b"{", b"[]", b'"latest"', b"\xff"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ConfigError):
        http._object(body)
    assert http._object(b" ") == {}


# --- who may serve --------------------------------------------------------------------------------------------------


def test_no_request_runs_before_the_front_has_started_and_none_if_it_cannot() -> None:
    async def main() -> None:
        fake = FakeManager()
        engine = SGLangEngine(wrapped(fake), 0.2, lambda *call: call, Received)
        taken = Managed(engine.manager, weight_source_config({"follow": False, "timeout_s": 0.2}), engine)
        fake.answers = lambda call, arguments: [{"shard": 0, "ok": False, "message": "its weights are its own"}]
        with pytest.raises(StateError, match="its weights are its own"):
            async for _ in fake.generate_request(3):
                pass
        assert fake.log == ["describe"]
        assert taken.failure is not None
        with pytest.raises(StateError, match="its weights are its own"):
            await taken.start()
        with pytest.raises(StateError, match="not started with"):
            managed(fake)

    asyncio.run(main())


class App:
    """A web application that starts as Starlette's do: `began` has what ran, in order."""

    def __init__(self, began: list[str]) -> None:
        self.router, self.began = self, began

    @contextlib.asynccontextmanager
    async def lifespan_context(self, app: Any) -> AsyncIterator[None]:
        self.began.append("warm-up")
        yield
        self.began.append("closed")

    def run(self) -> None:
        """Serve as uvicorn does: what a start raises is logged, and ends it."""

        async def serve() -> None:
            async with self.router.lifespan_context(self):
                self.began.append("serving")

        with contextlib.suppress(StateError):
            asyncio.run(serve())


@pytest.mark.parametrize("agree", [True, False])
def test_a_server_whose_front_cannot_start_serves_nothing_and_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, agree: bool
) -> None:
    monkeypatch.setattr(http, "add_routes", lambda app, front: None)
    began: list[str] = []

    class Taken:
        failure: str | None = None
        serves = False
        front = None

        async def start(self) -> None:
            began.append("front")
            if not agree:
                self.failure = "StateError: the ranks do not agree"
                raise StateError(self.failure)

        async def end(self) -> None:
            began.append("left")

    taken, app = Taken(), App(began)
    original = app.router.lifespan_context
    if agree:
        http.serve(taken, app.run, app)  # type: ignore[arg-type]
        assert began == ["front", "warm-up", "serving", "closed", "left"]
    else:
        with pytest.raises(SystemExit, match="the ranks do not agree"):
            http.serve(taken, app.run, app)  # type: ignore[arg-type]
        assert began == ["front"]
    assert taken.serves
    assert app.router.lifespan_context == original


def test_an_engine_that_ends_leaves_the_hub_first_and_lets_go_of_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        fake = FakeManager()
        engine = SGLangEngine(wrapped(fake), 5.0, lambda *call: call, Received)
        taken = Managed(engine.manager, weight_source_config({"follow": False}), engine)
        await engine.pause("keep")
        fake.log.clear()
        ended = asyncio.Event()
        fake.aborts = [ended]
        held = asyncio.create_task(fake.run_request("held", ended))
        await asyncio.sleep(0.02)
        fake.signal_handler_class(fake).sigterm_handler()
        await soon(lambda: ended.is_set())
        await held
        await taken.end()
        assert fake.log[:2] == ["SIGTERM", "leave"]
        assert fake.log.count("leave") == 1

    asyncio.run(main())
