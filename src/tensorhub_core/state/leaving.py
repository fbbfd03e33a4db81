"""Workers that leave, and what is lost with those that are gone (law L11)."""

from __future__ import annotations

from tensorhub_core.errors import StateError, VersionUnavailable
from tensorhub_core.ids import ModelName, ReplicaName, VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.keeping import is_free, is_retained, review
from tensorhub_core.state.messages import HandOver, Ok
from tensorhub_core.state.records import Group, ModelState, VersionRecord, Worker
from tensorhub_core.state.versions import show
from tensorhub_core.state.zones import note_absent


def hand_over(s: Step, worker: Worker, request: int, _: HandOver) -> None:
    """Answer when no retained version depends on the worker's replica any more."""
    if worker.handover_request is not None and worker.handover_request != request:
        s.fail(worker, worker.handover_request, StateError("another close() has taken over"))
    worker.leaving, worker.handover_request = True, request
    s.model(worker).handovers.add(worker.id)
    s.kept.add(worker.model)
    note_absent(s, worker)


def answer_handovers(s: Step, model: ModelState) -> None:
    """Tell those who are about to leave that nothing depends on them, or that nobody is there to take it over."""
    for worker_id in sorted(model.handovers):
        worker = s.state.workers[worker_id]
        group = s.group(worker)
        bound = [key for key, record in model.versions.items() if not is_free(s, model, group, record)]
        if bound and any(may_take_over(s, other) for other in model.groups.values() if other is not group):
            continue
        request, worker.handover_request = worker.handover_request, None
        model.handovers.discard(worker_id)
        if request is not None and bound:
            text = f"nobody is there who could take over version {', '.join(map(show, sorted(bound)))}"
            s.fail(worker, request, VersionUnavailable(text))
        elif request is not None:
            s.reply(worker, request, Ok())


def may_take_over(s: Step, group: Group) -> bool:
    """Tell whether a replica may come to hold a version reliably; one that is only silent may be heard again."""
    return not group.spot and not any(w.leaving for w in s.members(group))


def after_failure(s: Step, name: ModelName, replica: ReplicaName, keys: set[VersionKey], reason: str) -> None:
    """See what was lost with a worker that is gone; who was letting go relying on it may still be able to keep it."""
    model = s.state.models[name]
    for key in sorted(keys):
        review(s, name, replica, key)
        record = model.versions.get(key)
        if record is None:
            continue
        lose(s, model, record, replica, reason)
        reconsider(s, model, record, replica)


def reconsider(s: Step, model: ModelState, record: VersionRecord, lost: ReplicaName) -> None:
    """Decide again for those that let a version go but still have it: they may have relied on this replica."""
    for other in (record.keeping.let_go & record.keeping.held) - {lost}:
        record.keeping.let_go.discard(other)
        s.changed.add((model.name, other, record.key))


def lose(s: Step, model: ModelState, record: VersionRecord, replica: ReplicaName, reason: str) -> None:
    """Note whether a version has lost its last holder, or its last reliable one, by a failure of this replica."""
    keeping = record.keeping
    gone = {replica} & keeping.let_go
    was = keeping.safe, keeping.reachable
    keeping.safe = keeping.safe and len(keeping.firm) > len(keeping.firm & gone)
    keeping.reachable = keeping.reachable and len(keeping.held) > len(keeping.held & gone)
    if is_retained(model, record) and (keeping.safe, keeping.reachable) != was:
        what = "its last reliable holder" if keeping.reachable else "its last holder"
        text = f"retained version {show(record.key)} has lost {what}, {replica!r}: {reason}"
        s.log("warning", f"model {model.name!r}: {text}")
