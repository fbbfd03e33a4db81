"""What an engine's front asks of its ranks by name, and the plain form of the answers that crosses the processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tensorhub_core.engine.shard import EngineShard
from tensorhub_core.engine.steps import ShardReport
from tensorhub_core.errors import ConfigError, StateError

RankReply = dict[str, Any]
"""A `ShardReport` as plain values; `describe` adds `model` and `replica`, `staged` adds `running`."""

OPTION = "--weight-source tensorhub"


def answer(shard: EngineShard | None, rank: int, call: str, arguments: Mapping[str, Any]) -> RankReply:
    """Carry out one call on this rank and report; the thread that the engine runs its model on.

    Never raises: engines stop listening to the other ranks at the first one that does. `shard` is None where the engine
    was not started from a hub.
    """
    try:
        if shard is None:
            raise StateError(f"this engine was not started with {OPTION}")
        known = CALLS.get(call)
        if known is None:
            raise ConfigError(f"unknown call {call!r}: both sides must have the same version of the adapter")
        return known(shard, **arguments)
    except Exception as error:  # the one place where nothing may get through
        code = str(getattr(error, "code", "error"))
        return _plain(ShardReport(rank, ok=False, code=code, message=str(error) or type(error).__name__))


def report_of(reply: RankReply) -> ShardReport:
    """Read a rank's reply; what it says besides the report is left out."""
    fields = ShardReport.__dataclass_fields__
    return msgspec.convert({key: value for key, value in reply.items() if key in fields}, ShardReport)


def _plain(report: ShardReport) -> RankReply:
    reply: RankReply = msgspec.to_builtins(report)
    return reply


def _describe(shard: EngineShard) -> RankReply:
    """Say which replica of which model this rank belongs to, and what it holds."""
    return {**_plain(shard.report()), "model": shard.worker.model, "replica": shard.worker.replica}


def _staged(shard: EngineShard) -> RankReply:
    """Say what is staged; `running` while it is on its way. To be called again until then."""
    report = shard.staged()
    return {**_plain(report or shard.report()), "running": report is None}


def _leave(shard: EngineShard) -> RankReply:
    """Take this rank's copy back, let its readers finish for a bounded time, and leave the hub."""
    shard.close()
    return _plain(shard.report())


CALLS: dict[str, Callable[..., RankReply]] = {
    "describe": _describe,
    "update": lambda shard, version, timeout_s=None: _plain(shard.update(version, timeout_s)),
    "stage": lambda shard, version, timeout_s=None: _plain(shard.stage(version, timeout_s)),
    "staged": _staged,
    "install": lambda shard, timeout_s=None: _plain(shard.install(timeout_s)),
    "discard": lambda shard: _plain(shard.discard()),
    "process": lambda shard: _plain(shard.process()),
    "publish": lambda shard: _plain(shard.publish()),
    "withdraw": lambda shard, timeout_s=None: _plain(shard.withdraw(timeout_s)),
    "leave": _leave,
}
"""`update`, `install`: fill the memory in one round with the other ranks, nothing is processed yet; `stage`: begin to
fetch into host memory and return; `process`: compute with what the memory holds; `publish`: offer it if it is not
offered yet; `withdraw`: take it back for good, its memory is about to go."""
