"""Describe what the server knows, for people and programs; changes nothing."""

from __future__ import annotations

from tensorhub_core.errors import VersionUnavailable
from tensorhub_core.ids import VersionKey
from tensorhub_core.state.candidates import is_late
from tensorhub_core.state.context import Step
from tensorhub_core.state.keeping import custodians, is_retained
from tensorhub_core.state.messages import (
    DescribeVersion,
    DrainStatus,
    FillStatus,
    GetStatus,
    HeldLayout,
    ListVersions,
    ModelStatus,
    OffloadStatus,
    PlaceStatus,
    ReplicaStatus,
    ShardStatus,
    SourceStatus,
    StatusReply,
    VersionLayouts,
    VersionRow,
    Versions,
    VersionStatus,
)
from tensorhub_core.state.records import OFFERED, Copy, CopyState, Group, ModelState, Worker
from tensorhub_core.state.sourcing import describe_holders
from tensorhub_core.state.versions import current_epoch, latest, newest_seen, note_told, offered_at, show, whole_groups
from tensorhub_core.state.zones import nothing_yet

_STATE_NAMES = {
    CopyState.FILLING: "filling",
    CopyState.HELD: "idle",
    CopyState.PUBLISHED: "published",
    CopyState.DRAINING: "draining",
}
_LOUDEST = ("suspected", "dirty", "draining", "filling", "offload", "idle", "published")


def describe_version(s: Step, worker: Worker, request: int, m: DescribeVersion) -> None:
    """List the layouts of a whole version."""
    model = s.model(worker)
    key = newest_seen(s, worker) if m.want is None else (current_epoch(model), m.want)
    groups = [] if key is None else sorted(whole_groups(s, model, key), key=lambda g: g.replica)
    if key is not None and not groups:
        groups = custodians(s, model, key)  # it will be offered again in a moment
    if key is None or not groups:
        text = f"version {show(key)} of model {model.name!r} is not whole anywhere; " if key else ""
        text = text or f"{nothing_yet(model, worker.zone)}; "
        return s.fail(worker, request, VersionUnavailable(text + describe_holders(s, model, key or (0, 0))))
    note_told(worker, key)
    layouts = tuple(
        HeldLayout(group.replica, w.shard, group.num_shards, copy.memory.layout, copy.converted)
        for group in groups
        for w in s.members(group)
        if (copy := w.copy_of(key, OFFERED)) is not None
    )
    s.reply(worker, request, VersionLayouts(*key, layouts))


def held_keys(s: Step, model: ModelState) -> list[VersionKey]:
    """Return the versions of which somebody holds a finished copy, oldest first."""
    keys = {
        copy.key
        for group in model.groups.values()
        for w in s.members(group)
        for copy in w.copies()
        if copy.state in OFFERED
    }
    return sorted(keys)


def list_versions(s: Step, worker: Worker, request: int, _: ListVersions) -> None:
    """List the model's versions that somebody holds."""
    model = s.model(worker)
    rows = []
    for key in held_keys(s, model):
        replicas = tuple(sorted(g.replica for g in model.groups.values() if offered_at(s, g, key)))
        record = model.versions.get(key)
        retained = record is not None and is_retained(model, record)
        rows.append(VersionRow(*key, bool(replicas), retained, replicas, 0 if record is None else record.total_bytes))
    s.reply(worker, request, Versions(tuple(rows)))


def shard_state(worker: Worker) -> str:
    """Return a shard's state in the words of DESIGN.md section 3."""
    if worker.suspected:
        return "suspected"
    if worker.copy is not None:
        return _STATE_NAMES[worker.copy.state]
    return "dirty" if worker.dirty else "offload" if worker.offloads else "idle"


def shard_status(s: Step, worker: Worker) -> ShardStatus:
    """Describe a shard."""
    copy = worker.copy or max(worker.offloads, key=lambda kept: kept.key, default=None)
    total_bytes = 0 if worker.memory is None else worker.memory.total_bytes
    state, place, sources = shard_state(worker), place_status(s, worker), source_statuses(s, worker)
    more = (place, sources, fill_status(s, worker))
    if copy is None:
        return ShardStatus(worker.shard, None, state, 0, total_bytes, None, 0.0, *more)
    names = ", ".join(sorted({source.replica for source in sources})) or None
    rate = rate_of(s, copy)
    return ShardStatus(worker.shard, copy.key[1], state, copy.done_bytes, total_bytes, names, rate, *more)


def place_status(s: Step, worker: Worker) -> PlaceStatus:
    """Say where a shard runs."""
    return PlaceStatus(s.group(worker).zone, worker.host, worker.rail)


def source_statuses(s: Step, worker: Worker) -> tuple[SourceStatus, ...]:
    """Describe whom a shard reads from."""
    zone = s.group(worker).zone
    holders = {w.id: w for w in (s.holder(s.state.copies[s.state.leases[i].copy]) for i in worker.leases)}
    found = [SourceStatus(w.replica, w.shard, place_status(s, w), s.group(w).zone != zone) for w in holders.values()]
    return tuple(sorted(found, key=lambda source: (source.replica, source.shard)))


def fill_status(s: Step, worker: Worker) -> FillStatus | None:
    """Describe what a shard is promised and has not got yet; None if there is nothing."""
    current = s.group(worker).open_round()
    copy = worker.unfinished()
    if current is None or current.key is None or worker.shard not in current.joined or current.kind == "install":
        return None
    staged = current.kind == "stage"
    if copy is None:  # promised, and nobody may queue behind it
        total_bytes = 0 if worker.memory is None else worker.memory.total_bytes
        return FillStatus(current.key[1], False, 0, total_bytes, staged=staged)
    begun = copy.state is CopyState.FILLING
    more = (copy.done_bytes, copy.memory.total_bytes, rate_of(s, copy), staged, is_late(s, copy))
    return FillStatus(copy.key[1], begun, *more)


def rate_of(s: Step, copy: Copy) -> float:
    """Return how many bytes a second a copy has filled at since it began."""
    if copy.state is not CopyState.FILLING or s.now <= copy.started_s:
        return 0.0
    return copy.done_bytes / (s.now - copy.started_s)


def waits_for(s: Step, group: Group) -> str | None:
    """Return what a replica's round waits for; None if there is none, or it has what was asked for."""
    current = group.open_round()
    if current is None or current.key is not None or current.kind == "install":
        return None
    return "latest" if current.want is None else str(current.want)


def replica_status(s: Step, group: Group) -> ReplicaStatus:
    """Describe a replica; its state is the loudest of its shards'."""
    shards = tuple(shard_status(s, w) for w in s.members(group))
    states = {shard.state for shard in shards}
    versions = {shard.version for shard in shards}
    state = next((name for name in _LOUDEST if name in states), "idle")
    version = versions.pop() if len(versions) == 1 and len(shards) == group.num_shards else None
    more = (group.seeds, waits_for(s, group))
    return ReplicaStatus(group.replica, group.zone, group.host, group.spot, version, state, shards, *more)


def model_status(s: Step, model: ModelState) -> ModelStatus:
    """Describe a model."""
    versions = []
    for key in held_keys(s, model):
        replicas = tuple(sorted(g.replica for g in model.groups.values() if offered_at(s, g, key)))
        record = model.versions.get(key)
        retained = record is not None and is_retained(model, record)
        versions.append(VersionStatus(key[1], bool(replicas), retained, replicas))
    replicas_status = tuple(replica_status(s, model.groups[name]) for name in sorted(model.groups))
    newest = latest(model)
    number = None if newest is None else newest[1]
    drain = DrainStatus(model.drains.count, model.drains.total_s, model.drains.max_s)
    kept = [c.memory.total_bytes for g in model.groups.values() for w in s.members(g) for c in w.offloads]
    offload = OffloadStatus(model.offloads_made, model.offloads_dropped, sum(kept))
    return ModelStatus(
        model.name, model.stream, current_epoch(model), number, tuple(versions), replicas_status, drain, offload
    )


def get_status(s: Step, worker: Worker, request: int, m: GetStatus) -> None:
    """Describe the server and one model, or all models that have a replica or a version."""
    names = sorted(n for n, model in s.state.models.items() if model.groups or model.versions)
    if m.model is not None:
        names = [n for n in names if n == m.model]
    models = tuple(model_status(s, s.state.models[n]) for n in names)
    s.reply(worker, request, StatusReply(s.state.config.server_epoch, s.now - s.state.started_s, models))
