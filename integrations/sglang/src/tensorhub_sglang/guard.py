"""What callers may still do with an engine whose weights belong to a hub: SGLang's own calls, guarded.

The memory that holds a published version must not change, or go, without the hub's knowing: others may read it at any
time, and completions name the version. So SGLang's own weight updates (`update_weights_from_*`, `begin_weight_update`,
`init_weights_update_group`, `update_weight_version`, the weight checker's `reset_tensors`) are refused; publish a
version instead. `release_memory_occupation` takes the copies back first, `resume_memory_occupation` fills them again
before a request runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorhub_core.engine.front import EngineFront
from tensorhub_core.errors import ERRORS, StateError, TensorHubError
from tensorhub_sglang.compat_server import ALL_MEMORY, CHANGES_WEIGHTS
from tensorhub_sglang.server import SGLangEngine

WEIGHTS = "weights"
REFUSED = (
    "this engine takes its weights from a hub, where others may read what it holds: publish a version there, or start "
    "it without --weight-source tensorhub"
)


class Guard:
    """Stand in for a TokenizerManager's calls that would change its weights, or let a half-swapped engine run."""

    def __init__(self, engine: SGLangEngine, front: EngineFront) -> None:
        """Guard an engine by its front; nothing changes before `install`."""
        self._engine, self._front = engine, front
        raw = engine.manager.raw
        self._check: Callable[..., Any] = raw.check_weights
        self._release: Callable[..., Any] = raw.release_memory_occupation
        self._resume: Callable[..., Any] = raw.resume_memory_occupation

    def install(self) -> None:
        """Put the guarded calls in the place of the TokenizerManager's own, for SGLang's HTTP server and Engine."""
        raw = self._engine.manager.raw
        for name in CHANGES_WEIGHTS:
            setattr(raw, name, _refuse)
        raw.update_weights_from_disk = _refuse_from_disk
        raw.update_weight_version = _refuse_version
        raw.check_weights = self.check_weights
        raw.release_memory_occupation = self.release_memory_occupation
        raw.resume_memory_occupation = self.resume_memory_occupation
        raw.pause_generation = self._engine.callers_pause
        raw.continue_generation = self.continue_generation

    async def continue_generation(self, obj: Any) -> None:
        """Go on as soon as the engine serves a version; raises StateError if none is going to come."""
        await self._engine.callers_continue(obj, lambda: self._front.status.state in ("serving", "swapping"))

    async def check_weights(self, obj: Any, request: Any = None) -> Any:
        """Check the weights, but do not scramble them."""
        if obj.action == "reset_tensors":
            return False, REFUSED, None, None
        return await self._check(obj, request)

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """Release memory; for weights the copies are taken back first and generation stops until they are back.

        Raises StateError, and nothing is released, if a rank cannot let go of its copy.
        """
        engine = self._engine
        tags = frozenset(obj.tags or ALL_MEMORY) - engine.released
        if not tags:
            return
        if WEIGHTS in tags:
            await self._front.sleep()
        engine.released |= tags
        obj.tags = sorted(tags)
        await self._release(obj, request)

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        """Resume memory; weights are filled from peers, and requests run when all that was released is back.

        Raises what kept the weights from being filled: the engine stays paused then, and follows on by itself.
        """
        engine = self._engine
        tags = frozenset(obj.tags or ALL_MEMORY)
        if not tags <= engine.released:
            raise StateError(f"this memory was not released: {', '.join(sorted(tags - engine.released))}")
        await self._resume(obj, request)
        engine.released -= tags
        if WEIGHTS in tags:
            outcome = await self._front.wake()
            if not outcome.ok:
                raise ERRORS.get(outcome.code, TensorHubError)(outcome.message)
        elif self._front.status.state == "serving":
            await engine.resume()


async def _refuse(obj: Any = None, request: Any = None) -> tuple[bool, str]:
    return False, REFUSED


async def _refuse_from_disk(obj: Any = None, request: Any = None) -> tuple[bool, str, int]:
    return False, REFUSED, 0


async def _refuse_version(obj: Any = None) -> None:
    raise StateError(REFUSED)
