"""SGLang's own calls while a hub has the weights: what is refused, and sleep and wake in the right order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_core.engine.steps import EngineStatus, SwapOutcome
from tensorhub_core.errors import StateError, VersionUnavailable
from tensorhub_sglang.compat_server import CHANGES_WEIGHTS
from tensorhub_sglang.guard import Guard
from tensorhub_sglang.server import SGLangEngine
from tests.unit.sglang.manager import FakeManager, Received, wrapped

pytestmark = pytest.mark.timeout(30)


class Front:
    """An engine's front that notes what it is told."""

    def __init__(self, log: list[Any], engine: SGLangEngine) -> None:
        self.log, self.engine = log, engine
        self.status = EngineStatus("policy", "engine", version=1)
        self.sleeps: Exception | None = None
        self.wakes = SwapOutcome(2, True)

    async def sleep(self) -> None:
        self.log.append("sleep")
        if self.sleeps is not None:
            raise self.sleeps
        await self.engine.pause("abort")

    async def wake(self) -> SwapOutcome:
        self.log.append("wake")
        if self.wakes.ok:
            await self.engine.resume()
        return self.wakes


def run(script: Callable[[FakeManager, Front], Awaitable[None]]) -> FakeManager:
    """Let `script(fake, front)` run on a guarded engine."""
    fakes = []

    async def main() -> None:
        fakes.append(FakeManager())
        engine = SGLangEngine(wrapped(fakes[0]), 5.0, lambda *call: call, Received)
        front = Front(fakes[0].log, engine)
        Guard(engine, front).install()  # type: ignore[arg-type]
        await script(fakes[0], front)

    asyncio.run(main())
    return fakes[0]


def tags(*names: str) -> Any:
    """Return SGLang's order to release or to resume; no names: all."""
    return SimpleNamespace(tags=list(names) or None)


def test_every_way_to_change_weights_behind_the_hubs_back_is_refused() -> None:
    async def script(fake: Any, front: Front) -> None:
        for name in CHANGES_WEIGHTS:
            success, message = await getattr(fake, name)(SimpleNamespace(), None)
            assert not success
            assert "publish a version there" in message
        success, message, paused = await fake.update_weights_from_disk(SimpleNamespace(), None)
        assert (success, paused) == (False, 0)
        with pytest.raises(StateError, match="publish a version there"):
            await fake.update_weight_version(SimpleNamespace(new_version="99"))
        assert (await fake.check_weights(SimpleNamespace(action="reset_tensors"), None))[0] is False
        assert (await fake.check_weights(SimpleNamespace(action="checksum"), None))[0] is True

    assert run(script).log == ["check checksum"]


def test_copies_are_taken_back_before_memory_goes_and_filled_before_requests_run() -> None:
    async def script(fake: FakeManager, front: Front) -> None:
        await fake.release_memory_occupation(tags())
        assert fake.log == ["sleep", "stop retract", "flush", ("release", ["cuda_graph", "kv_cache", "weights"])] or (
            fake.log[0] == "sleep" and fake.log[-1] == ("release", ["cuda_graph", "kv_cache", "weights"])
        )
        fake.log.clear()
        await fake.resume_memory_occupation(tags())

    assert run(script).log == [("resume", None), "wake", "go on"]


def test_requests_wait_for_all_memory_in_whatever_order_it_comes() -> None:
    async def script(fake: FakeManager, front: Front) -> None:
        await fake.release_memory_occupation(tags("kv_cache"))
        await fake.release_memory_occupation(tags())
        assert fake.log[0] == ("release", ["kv_cache"])
        assert fake.log[-1] == ("release", ["cuda_graph", "weights"]), "nothing is released twice"
        fake.log.clear()
        await fake.resume_memory_occupation(tags("weights"))
        assert fake.log == [("resume", ["weights"]), "wake"]
        await fake.resume_memory_occupation(tags("kv_cache"))
        assert fake.log[2:] == [("resume", ["kv_cache"]), "go on"]
        fake.log.clear()
        await fake.release_memory_occupation(tags("weights"))
        await fake.resume_memory_occupation(tags("weights"))
        assert fake.log[-3:] == [("resume", ["weights"]), "wake", "go on"]

    run(script)


def test_memory_that_a_rank_does_not_let_go_of_is_not_released() -> None:
    async def script(fake: FakeManager, front: Front) -> None:
        front.sleeps = StateError("a reader does not let go")
        with pytest.raises(StateError, match="does not let go"):
            await fake.release_memory_occupation(tags())
        with pytest.raises(StateError, match="not released"):
            await fake.resume_memory_occupation(tags("weights"))

    assert run(script).log == ["sleep"]


def test_weights_that_cannot_be_filled_keep_requests_waiting() -> None:
    async def script(fake: FakeManager, front: Front) -> None:
        await fake.release_memory_occupation(tags())
        front.wakes = SwapOutcome(None, False, "version_unavailable", "nobody holds a version")
        front.status = EngineStatus("policy", "engine", state="paused")
        with pytest.raises(VersionUnavailable, match="nobody holds"):
            await fake.resume_memory_occupation(tags())
        assert fake.is_pause
        with pytest.raises(StateError):
            await fake.continue_generation(SimpleNamespace())
        assert fake.is_pause

    run(script)
