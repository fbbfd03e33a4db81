"""Staged copies: a second copy of a worker, in host memory, while its registered memory serves another version."""

from __future__ import annotations

from dataclasses import replace

from tensorhub_core.errors import StateError
from tensorhub_core.ids import Digest
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import mark_copy
from tensorhub_core.state.leases import drop_copy
from tensorhub_core.state.messages import Ok, RegisterStaging, Unstage
from tensorhub_core.state.records import CopyState, Worker
from tensorhub_core.state.rounds import abort


def register(s: Step, worker: Worker, request: int, m: RegisterStaging) -> None:
    """Note where a worker stages versions; a copy that is staged already keeps the memory it lies in."""
    if worker.memory is None:
        return s.fail(worker, request, StateError("staging needs registered tensors: call register() first"))
    placement = Digest(m.placement)
    if placement not in s.state.blobs:
        return s.fail(worker, request, StateError("the placement blob was not uploaded before its registration"))
    worker.staging = replace(worker.memory, placement=placement)
    s.reply(worker, request, Ok())


def unstage(s: Step, worker: Worker, request: int, _: Unstage) -> None:
    """Take the worker's staged copy back; the answer is deferred until it has drained (law L3)."""
    copy = worker.staged
    if copy is not None and copy.state is CopyState.FILLING:
        group = s.group(worker)
        current = group.open_round()
        if current is not None:
            text = f"shard {worker.shard} of replica {group.replica!r} gave up what it was staging"
            abort(s, group, current, StateError(text), told=worker.shard)
    elif copy is not None and copy.state is CopyState.HELD:
        drop_copy(s, copy, "discarded")
    if worker.staged is None:
        return s.reply(worker, request, Ok())
    if worker.unstage_request is not None and worker.unstage_request != request:
        s.fail(worker, worker.unstage_request, StateError("another discard() has taken over"))
    worker.staged.state = CopyState.DRAINING
    mark_copy(s, worker, worker.staged)
    worker.unstage_request = request
    s.state.draining.add(worker.staged.id)
    s.touch(worker)
