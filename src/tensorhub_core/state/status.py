"""Describe what the server knows, for people and programs; changes nothing."""

from __future__ import annotations

from tensorhub_core.errors import VersionUnavailable
from tensorhub_core.ids import VersionKey
from tensorhub_core.state.context import Step
from tensorhub_core.state.keeping import custodians, is_retained
from tensorhub_core.state.messages import (
    DescribeVersion,
    DrainStatus,
    GetStatus,
    HeldLayout,
    ListVersions,
    ModelStatus,
    OffloadStatus,
    ReplicaStatus,
    ShardStatus,
    StatusReply,
    VersionLayouts,
    VersionRow,
    Versions,
    VersionStatus,
)
from tensorhub_core.state.records import OFFERED, CopyState, Group, ModelState, Worker
from tensorhub_core.state.sourcing import describe_holders
from tensorhub_core.state.versions import current_epoch, latest, offered_at, show, whole_groups

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
    key = latest(model) if m.want is None else (current_epoch(model), m.want)
    groups = [] if key is None else sorted(whole_groups(s, model, key), key=lambda g: g.replica)
    if key is not None and not groups:
        groups = custodians(s, model, key)  # it will be offered again in a moment
    if key is None or not groups:
        text = f"version {'latest' if key is None else show(key)} of model {model.name!r} is not whole anywhere; "
        return s.fail(worker, request, VersionUnavailable(text + describe_holders(s, model, key or (0, 0))))
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
    state = shard_state(worker)
    if copy is None:
        return ShardStatus(worker.shard, None, state, 0, total_bytes, None, 0.0)
    sources = sorted({s.holder(s.state.copies[s.state.leases[i].copy]).replica for i in worker.leases})
    rate = 0.0
    if copy.state is CopyState.FILLING and s.now > copy.started_s:
        rate = copy.done_bytes / (s.now - copy.started_s)
    return ShardStatus(worker.shard, copy.key[1], state, copy.done_bytes, total_bytes, ", ".join(sources) or None, rate)


def replica_status(s: Step, group: Group) -> ReplicaStatus:
    """Describe a replica; its state is the loudest of its shards'."""
    shards = tuple(shard_status(s, w) for w in s.members(group))
    states = {shard.state for shard in shards}
    versions = {shard.version for shard in shards}
    state = next((name for name in _LOUDEST if name in states), "idle")
    version = versions.pop() if len(versions) == 1 and len(shards) == group.num_shards else None
    return ReplicaStatus(group.replica, group.zone, group.host, group.spot, version, state, shards)


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
