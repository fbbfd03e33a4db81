"""Every rank's side of a call from the server: carried out on its scheduler's thread, between two steps of the model.

SGLang hands a request to all ranks of an engine but sends only rank 0's answer back. So the ranks tell each other what
they have to say, and rank 0's answer holds every rank's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from tensorhub_core.engine.calls import RankReply, answer
from tensorhub_core.errors import StateError

_MAX_REPLY_BYTES = 64 * 1024
"""Of what one rank says; a longer message is cut."""
_MAX_MESSAGE = 8 * 1024


def handle(scheduler: Any, call: str, arguments: str, shard: Any, group: Any, rank: int) -> list[str]:
    """Carry out a call on this rank and return what every rank says to it, as JSON, in order of rank.

    All ranks of `group` have to be called alike. Raises only if the group is broken: then a rank is gone, and the
    engine has to end.
    """
    own = carry_out(scheduler, call, arguments, shard, rank)
    return from_all(to_text(own, rank), group)


def carry_out(scheduler: Any, call: str, arguments: str, shard: Any, rank: int) -> RankReply:
    """Carry out a call on this rank; never raises."""
    try:
        given = json.loads(arguments)
        ours = _OURS.get(call)
        return answer(shard, rank, call, given) if ours is None else ours(scheduler, **given)
    except Exception as error:  # a rank that raised would leave the others waiting for it
        return {"shard": rank, **_failure(error)}


def to_text(reply: RankReply, rank: int) -> str:
    """Return a reply as JSON of bounded length."""
    try:
        text = json.dumps(reply)
        if len(text) > _MAX_REPLY_BYTES:
            text = json.dumps({key: _cut(value) for key, value in reply.items()})
        if len(text) > _MAX_REPLY_BYTES:
            raise StateError(f"the reply has {len(text)} bytes")
    except Exception as error:
        text = json.dumps({"shard": rank, **_failure(error)})
    return text


def from_all(text: str, group: Any) -> list[str]:
    """Return what every rank of `group` says, in order of rank; all of them have to call this."""
    import torch.distributed as distributed

    count = distributed.get_world_size(group=group)
    if count == 1:
        return [text]
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    distributed.all_gather(sizes, torch.tensor([len(own)], dtype=torch.int64), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = own
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(count)]
    distributed.all_gather(rows, padded, group=group)
    return [bytes(row[: int(size)].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def _flush(scheduler: Any) -> RankReply:
    """Forget everything that was computed with the weights so far; `busy`: requests run, so that waiting is no use.

    A paused scheduler no longer looks at requests whose grammar was compiled meanwhile, and they keep its cache from
    being flushed: they are put in line here.
    """
    grammars = scheduler.grammar_manager
    if grammars.has_waiting_grammars():
        for request in grammars.get_ready_grammar_requests():
            scheduler._add_request_to_queue(request)
    flushed = bool(scheduler.flush_cache(empty_cache=False))
    last = scheduler.last_batch
    busy = not flushed and not (
        scheduler.running_batch.is_empty() and scheduler.chunked_req is None and (last is None or last.is_empty())
    )
    message = "" if flushed else "requests are running" if busy else "requests are being prepared"
    return {"ok": flushed, "busy": busy, "code": "" if flushed else "state_error", "message": message}


def _set_version(scheduler: Any, version: str) -> RankReply:
    """Name the version in the answers to come; a request that goes on keeps the names of what it has said."""
    scheduler.record_weight_version_change(new_version=version)
    return {"ok": True, "code": "", "message": ""}


_OURS: dict[str, Callable[..., RankReply]] = {"flush": _flush, "set_version": _set_version}
"""Calls that are about the engine, not about its shard of the weights."""


def _failure(error: Exception) -> RankReply:
    message = str(error) or type(error).__name__
    return {"ok": False, "code": str(getattr(error, "code", "error")), "message": message[:_MAX_MESSAGE]}


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_MESSAGE:
        return value[:_MAX_MESSAGE] + " ..."
    return value
