"""What must hold of retained versions after every step (law L11); part of `invariants.check`.

Counts holders afresh from the copies, so that nothing here depends on what the machine itself takes for reliable.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub_core.ids import VersionKey
from tensorhub_core.state.records import OFFERED, Copy, CopyState, Group, ModelState, ServerState, VersionRecord


def holds_all(state: ServerState, group: Group, key: VersionKey, states: tuple[CopyState, ...]) -> bool:
    """Tell whether every shard of a replica has a copy in one of these states in registered or offload memory."""

    def has(copies: list[Copy | None]) -> bool:
        return any(copy is not None and copy.key == key and copy.state in states for copy in copies)

    workers = [state.workers[worker] for worker in group.members.values()]
    return len(workers) == group.num_shards and all(has([w.copy, *w.offloads]) for w in workers)


def l11_retained_means_reachable(state: ServerState) -> Iterator[str]:
    """A retained version is held by a replica that is not spot, unless a failure took the last one; then by any."""
    for model, record in _retained(state):
        holders = [group for group in model.groups.values() if holds_all(state, group, record.key, OFFERED)]
        if record.keeping.reachable and not holders:
            yield f"{model.name}: retained version {record.key} is lost without a failure"
        if record.keeping.safe and all(group.spot for group in holders):
            yield f"{model.name}: retained version {record.key} is left to spot workers without a failure"


def l11_custody_means_held(state: ServerState) -> Iterator[str]:
    """Who has to keep a version has all of it, and is withdrawing it; nobody has to keep it and need not."""
    for model, record in _retained(state):
        keeping = record.keeping
        for replica in keeping.custody:
            group = model.groups.get(replica)
            if group is None or not holds_all(state, group, record.key, OFFERED):
                yield f"{model.name}: {replica} has to keep {record.key}, but does not hold it"
        if not keeping.custody.isdisjoint(keeping.let_go):
            yield f"{model.name}: {keeping.custody & keeping.let_go} have to keep {record.key}, and need not"


def l11_released_when_others_are_safe(state: ServerState) -> Iterator[str]:
    """A publisher does not secure its own version, and neither does a spot replica."""
    for model in state.models.values():
        for record in model.versions.values():
            by = record.keeping.secured_by
            if by is not None and by == record.creator:
                yield f"{model.name}: {record.key} is secured by {by}, which published it"


def l11_offload_copies_agree(state: ServerState) -> Iterator[str]:
    """Offload copies are complete, one a version and worker, known to their holder and to the state."""
    for worker in state.workers.values():
        keys = [copy.key for copy in worker.offloads]
        if len(keys) != len(set(keys)):
            yield f"{worker.id} has offloaded a version twice: {keys}"
        for copy in worker.offloads:
            complete = copy.state in OFFERED and copy.prefix == copy.memory.num_segments
            if not complete or copy.id not in state.offloads or state.copies.get(copy.id) is not copy:
                yield f"offload copy {copy.id} of {worker.id} is {copy.state} with {copy.prefix} segments"
    if state.offloads != {copy.id for worker in state.workers.values() for copy in worker.offloads}:
        yield "the offload copies of the workers are not those of the state"


def l11_index_agrees(state: ServerState) -> Iterator[str]:
    """The index of who holds a version says what the copies say."""
    for model in state.models.values():
        offered, published = (_whole_at(state, model, states) for states in (OFFERED, (CopyState.PUBLISHED,)))
        for key, record in model.versions.items():
            for states, found, names in (
                (OFFERED, offered, record.keeping.held),
                ((CopyState.PUBLISHED,), published, record.keeping.whole),
            ):
                right = found.get(key, set())
                if names != right:
                    yield f"{model.name}: {key} is {states[-1]} at {sorted(right)}, not at {sorted(names)}"
            firm = {name for name in record.keeping.held if not model.groups[name].spot}
            if record.keeping.firm != firm:
                yield f"{model.name}: {key} is held firmly at {sorted(firm)}, not at {sorted(record.keeping.firm)}"


def _whole_at(state: ServerState, model: ModelState, states: tuple[CopyState, ...]) -> dict[VersionKey, set[str]]:
    """Return, by version, the replicas of which `holds_all` is true: counted at once, as it is after every step."""
    found: dict[VersionKey, set[str]] = {}
    for group in model.groups.values():
        workers = [state.workers[worker] for worker in group.members.values()]
        if not workers or len(workers) != group.num_shards:
            continue
        held = [{c.key for c in (w.copy, *w.offloads) if c is not None and c.state in states} for w in workers]
        for key in set.intersection(*held):
            found.setdefault(key, set()).add(group.replica)
    return found


def l11_workers_that_wait_are_known(state: ServerState) -> Iterator[str]:
    """Who waits to leave, or for others to hold what it cannot keep, is a worker of the model with that wish."""
    for model in state.models.values():
        for wants, names in (("handover_request", model.handovers), ("offload_failed", model.stuck)):
            mine = {w.id for w in state.workers.values() if w.model == model.name and getattr(w, wants) is not None}
            if mine != names:
                yield f"{model.name}: {wants} of {sorted(mine)}, noted {sorted(names)}"


def _retained(state: ServerState) -> Iterator[tuple[ModelState, VersionRecord]]:
    for model in state.models.values():
        for record in model.versions.values():
            if model.retain and record.was_whole and not record.keeping.released:
                yield model, record


RETENTION_LAWS = (
    l11_retained_means_reachable,
    l11_custody_means_held,
    l11_released_when_others_are_safe,
    l11_offload_copies_agree,
    l11_index_agrees,
    l11_workers_that_wait_are_known,
)
