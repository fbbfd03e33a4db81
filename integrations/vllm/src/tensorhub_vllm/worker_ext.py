"""What the API server may ask a rank: added to vLLM's worker class as `worker_extension_cls`.

None of these calls raises: a rank that raised would make vLLM's executor stop reading the other ranks' replies, and
every later call would get the replies of the one before. A failure is a report that says so.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.steps import ShardReport
from tensorhub_core.errors import StateError
from tensorhub_vllm.loader import ATTRIBUTE

Reply = dict[str, Any]


class TensorHubWorkerExtension:
    """Mixed into vLLM's worker: every method belongs to the worker's own thread."""

    def tensorhub_describe(self) -> Reply:
        """Say which replica of which model this rank belongs to, and what it holds."""

        def describe(shard: EngineShard) -> Reply:
            return {**_wire(shard.report()), "model": shard.worker.model, "replica": shard.worker.replica}

        return self._tensorhub(describe)

    def tensorhub_update(self, version: int | Literal["latest"], timeout_s: float | None = None) -> Reply:
        """Fill this rank's memory, in one round with the others; nothing is processed yet."""
        return self._tensorhub(lambda shard: _wire(shard.update(version, timeout_s)))

    def tensorhub_stage(self, version: int | Literal["latest"], timeout_s: float | None = None) -> Reply:
        """Begin to fetch a version into this rank's host memory and return: the rank goes on computing."""
        return self._tensorhub(lambda shard: _wire(shard.stage(version, timeout_s)))

    def tensorhub_staged(self) -> Reply:
        """Say what is staged; `running` while it is on its way. To be called again until then."""

        def staged(shard: EngineShard) -> Reply:
            report = shard.staged()
            return {**_wire(report or shard.report()), "running": report is None}

        return self._tensorhub(staged)

    def tensorhub_install(self, timeout_s: float | None = None) -> Reply:
        """Copy what is staged into this rank's memory, in one round with the others; nothing is processed yet."""
        return self._tensorhub(lambda shard: _wire(shard.install(timeout_s)))

    def tensorhub_discard(self) -> Reply:
        """Drop what is staged."""
        return self._tensorhub(lambda shard: _wire(shard.discard()))

    def tensorhub_process(self) -> Reply:
        """Make this rank compute with what its memory holds."""
        return self._tensorhub(lambda shard: _wire(shard.process()))

    def tensorhub_publish(self) -> Reply:
        """Offer this rank's memory if it is not offered yet."""
        return self._tensorhub(lambda shard: _wire(shard.publish()))

    def tensorhub_leave(self) -> Reply:
        """Take this rank's copy back, let its readers finish for a bounded time, and leave the hub."""

        def leave(shard: EngineShard) -> Reply:
            shard.close()
            return _wire(shard.report())

        return self._tensorhub(leave)

    def _tensorhub(self, call: Any) -> Reply:
        try:
            shard = getattr(self.get_model(), ATTRIBUTE, None)  # type: ignore[attr-defined]
            if shard is None:
                raise StateError("this engine was not started with --weight-source tensorhub")
            reply: Reply = call(shard)
        except Exception as error:  # the one place where nothing may get through
            rank = int(getattr(self, "rank", 0))
            code = getattr(error, "code", "error")
            return _wire(ShardReport(rank, ok=False, code=str(code), message=str(error) or type(error).__name__))
        return reply


def _wire(report: ShardReport) -> Reply:
    reply: Reply = msgspec.to_builtins(report)
    return reply


def report_of(reply: Reply) -> ShardReport:
    """Read a rank's reply; what it says besides the report is left out."""
    fields = ShardReport.__dataclass_fields__
    return msgspec.convert({key: value for key, value in reply.items() if key in fields}, ShardReport)
