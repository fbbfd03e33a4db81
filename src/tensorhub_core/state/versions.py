"""Versions: who may create which number, what is whole, what is latest (laws L1, L10, L12)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tensorhub_core.errors import StateError, TensorHubError, VersionConflict
from tensorhub_core.ids import Digest, VersionKey
from tensorhub_core.state import zones
from tensorhub_core.state.context import Step
from tensorhub_core.state.index import mark_copy
from tensorhub_core.state.keeping import check_room, kept_copies
from tensorhub_core.state.leases import add_copy, drop_copy, new_copy_id
from tensorhub_core.state.messages import Available, Ok, Publish, Published, Unpublish, Wait
from tensorhub_core.state.names import add_stream, check_streams
from tensorhub_core.state.records import (
    UNFINISHED,
    Copy,
    CopyState,
    Group,
    ModelState,
    Registration,
    VersionRecord,
    Waiting,
    Worker,
)

PADDING_TOO = "what lies outside of all boxes (padding) counts as well, and has to be alike at all replicas"


def show(key: VersionKey | None) -> str:
    """Write a version for people."""
    return "none" if key is None else f"{key[1]} (epoch {key[0]})"


def whole_at(s: Step, group: Group, key: VersionKey) -> bool:
    """Tell whether every shard of the replica publishes the version, in registered or offload memory (law L1)."""
    copies = kept_copies(s, group, key)
    return bool(copies) and all(copy.state is CopyState.PUBLISHED for copy in copies)


def offered_at(s: Step, group: Group, key: VersionKey) -> bool:
    """Tell whether every shard of the replica offers the version, be it published or staged.

    That does for a reader, but only `whole_at` makes a version visible in the first place.
    """
    return len(group.members) == group.num_shards and all(
        w.copy_of(key, (CopyState.PUBLISHED,)) is not None for w in s.members(group)
    )


def whole_groups(s: Step, model: ModelState, key: VersionKey) -> Iterator[Group]:
    """Yield the replicas that offer the version whole and whose workers all seem to live."""
    for replica in model.finished.get(key, ()):
        group = model.groups[replica]
        if offered_at(s, group, key) and not any(w.suspected for w in s.members(group)):
            yield group


def latest(model: ModelState) -> VersionKey | None:
    """Return what `latest` means: the highest version that was ever whole or heard of (law L10)."""
    keys = [key for key in (model.high, model.heard) if key is not None]
    return max(keys, default=None)


def newest_seen(s: Step, worker: Worker) -> VersionKey | None:
    """Return what `latest` means to a worker, an observer or a shard: the newest version that its zone may see.

    That is the newest one of all, unless seed agents hold it back in the zone (`state/zones.py`): then the newest one
    that is there, or the one that the worker or another shard of its replica was told of, if that is newer. None if
    that is not to be had: wait for the next one.
    """
    model = s.model(worker)
    newest = latest(model)
    group = None if worker.observer else s.group(worker)
    zone = worker.zone if group is None else group.zone
    if newest is None or newest != model.high or (group is not None and group.seeds):
        return newest
    if not zones.holds_back(s, model, zone, newest):
        return newest
    there = model.leads[zone].newest
    told = max((w.told for w in ([worker] if group is None else s.members(group)) if w.told is not None), default=None)
    if there is not None and (told is None or told <= there) and zones.is_there(s, model, zone, there):
        return there
    own = group is not None and told is not None and has_itself(s, group, told)
    return told if told is not None and (own or next(whole_groups(s, model, told), None) is not None) else None


def has_itself(s: Step, group: Group, key: VersionKey) -> bool:
    """Tell whether some shard of a replica has a version, or says so in the round that it is in."""
    current = group.open_round()
    joined = () if current is None else current.joined.values()
    copies = [copy for w in s.members(group) for copy in w.copies() if copy.state not in UNFINISHED]
    return any(shard.have == key for shard in joined) or any(copy.key == key for copy in copies)


def note_told(worker: Worker, key: VersionKey | None) -> None:
    """Remember that a worker was told of a version: `latest` is none before it any more (law L10)."""
    if key is not None and (worker.told is None or key > worker.told):
        worker.told = (key[0], key[1])


def current_epoch(model: ModelState) -> int:
    """Return the stream epoch in which explicit numbers are looked up."""
    newest = latest(model)
    return model.epoch if newest is None else newest[0]


def highest_number(model: ModelState, epoch: int) -> int:
    """Return the highest number created in an epoch, -1 if none."""
    numbers = [key[1] for key in model.versions if key[0] == epoch]
    numbers += [key[1] for key in (model.high, model.heard, model.created) if key and key[0] == epoch]
    return max(numbers, default=-1)


def creation_key(model: ModelState, worker: Worker, number: int) -> VersionKey:
    """Return the key under which the worker may publish `number`; raises VersionConflict for a stream that is over."""
    stream = worker.stream
    if stream is None and worker.creates_in is not None and worker.creates_in < model.epoch:
        raise VersionConflict(
            f"the versions of model {model.name!r} that this worker went on with are over, stream {model.stream!r} has "
            "taken their place: connect with a new stream name to start again, or under a model name of your own"
        )
    if stream is None or stream == model.stream:
        return (model.epoch, number)
    if stream in model.streams:
        raise VersionConflict(
            f"stream {stream!r} of model {model.name!r} is over, {model.stream!r} has taken its place: "
            "connect with a new stream name to start again"
        )
    fresh = model.stream is None and not model.versions and model.heard is None and model.created is None
    return (model.epoch if fresh else model.epoch + 1, number)


def check_creation(model: ModelState, worker: Worker, key: VersionKey, layout: Digest, sums: Digest) -> None:
    """Refuse a version that law L10 forbids; raises VersionConflict."""
    record = model.versions.get(key)
    if record is not None and layout in record.manifests:
        if record.manifests[layout] != sums:
            raise VersionConflict(
                f"version {show(key)} of model {model.name!r} was published with other bytes (by {record.creator!r}): "
                f"publish under a higher number, or name a new stream to start over; {PADDING_TOO}"
            )
        return
    newest = highest_number(model, key[0])
    if key[1] < newest or (record is None and key[1] == newest):
        raise VersionConflict(
            f"model {model.name!r} is at version {newest} of epoch {key[0]}; {key[1]} is not newer: "
            "publish a higher number, or connect with a new stream name to start over"
        )


def doubt_creator(s: Step, model: ModelState, worker: Worker, key: VersionKey, layout: Digest) -> None:
    """Log that a second replica creates a version in a layout of its own: nothing tells two jobs from one then."""
    record = model.versions.get(key)
    if record is not None and record.creator != worker.replica and layout not in record.manifests:
        s.log(
            "warning",
            f"model {model.name!r}: version {show(key)} comes from {record.creator!r}, and in another layout from "
            f"{worker.replica!r}: if these are two jobs, give each a model name or a stream of its own",
        )


def enter_stream(s: Step, model: ModelState, worker: Worker, key: VersionKey) -> None:
    """Make the worker's stream the model's current one."""
    if key[0] > model.epoch:
        s.log("info", f"model {model.name!r}: stream {worker.stream!r} starts epoch {key[0]}")
        model.epoch = key[0]
    if worker.stream is not None and worker.stream != model.stream:
        add_stream(s, model, worker.stream)


def bind_manifest(s: Step, worker: Worker, key: VersionKey, layout: Digest, sums: Digest, total_bytes: int) -> None:
    """Remember the first sums of (version, layout); the caller has checked that they may stand."""
    model = s.model(worker)
    record = model.versions.get(key)
    if record is None:
        record = model.versions[key] = VersionRecord(key, worker.replica)
    record.manifests.setdefault(layout, sums)
    record.total_bytes = max(record.total_bytes, total_bytes)


def publish(s: Step, worker: Worker, request: int, m: Publish) -> None:
    """Publish what the worker's memory holds, at once or not at all; answers `Published` or `Failure`."""
    memory = worker.memory
    if memory is None:
        return s.fail(worker, request, StateError("publish needs registered tensors: call register() first"))
    sums = Digest(m.sums)
    if sums not in s.state.blobs:
        return s.fail(worker, request, StateError("the checksums were not uploaded before publish"))
    model = s.model(worker)
    copy = worker.copy
    try:
        if m.number < 0:
            raise VersionConflict(f"version numbers start at 0, not {m.number}")
        if m.held_epoch is None:
            key = creation_key(model, worker, m.number)
            if not (copy is not None and copy.key == key and copy.state is not CopyState.FILLING):
                check_creation(model, worker, key, memory.layout, sums)
                check_room(s, worker, memory, m.room_bytes)
                if worker.stream not in (None, model.stream):
                    check_streams(s, model)
        else:
            key = (m.held_epoch, m.number)
        check_publishable(model, worker, key, memory, sums)
    except TensorHubError as error:
        return s.fail(worker, request, error)
    if copy is None or copy.state is CopyState.HELD:
        if m.held_epoch is None:
            doubt_creator(s, model, worker, key, memory.layout)
        if copy is not None:
            drop_copy(s, copy, "published")
        put_copy(s, worker, key, memory, sums, m.converted)
    worker.room_bytes = m.room_bytes
    if m.held_epoch is None:
        worker.creates_in = key[0]
    s.reply(worker, request, Published(*key))


def check_publishable(model: ModelState, worker: Worker, key: VersionKey, memory: Registration, sums: Digest) -> None:
    """Refuse what the worker's present copy or the version's first manifest forbid."""
    copy = worker.copy
    record = model.versions.get(key)
    bound = None if record is None else record.manifests.get(memory.layout)
    if bound is not None and bound != sums:
        raise VersionConflict(
            f"version {show(key)} of model {model.name!r} has other bytes in this layout; {PADDING_TOO}"
        )
    if copy is None or copy.state is CopyState.HELD:
        return
    if copy.state is CopyState.FILLING:
        raise StateError("the memory is being filled: wait for replicate() before publish()")
    if copy.state is CopyState.DRAINING:
        raise StateError("the copy is draining: finish unpublish() before publish()")
    if copy.key != key:
        raise StateError(f"version {show(copy.key)} is published: call unpublish() before publish({key[1]})")
    if copy.sums != sums or copy.memory != memory:
        raise VersionConflict(f"version {show(key)} is already published with other bytes: the tensors were changed")


def put_copy(
    s: Step, worker: Worker, key: VersionKey, memory: Registration, sums: Digest, converted: bool = False
) -> None:
    """Make a published copy and see whether its replica is whole now."""
    model = s.model(worker)
    enter_stream(s, model, worker, key)
    bind_manifest(s, worker, key, memory.layout, sums, memory.total_bytes)
    worker.dirty = False
    note_told(worker, key)
    segments, size, state = memory.num_segments, memory.total_bytes, CopyState.PUBLISHED
    copy = Copy(new_copy_id(s), worker.id, key, memory, state, sums, segments, True, 0, size, converted=converted)
    add_copy(s, worker, copy)
    note_whole(s, s.group(worker), key)


def note_whole(s: Step, group: Group, key: VersionKey) -> None:
    """Record that a version has become whole at a replica."""
    model = s.state.models[group.model]
    if not whole_at(s, group, key):
        return
    record = model.versions[key]
    if not record.was_whole:
        s.touched.add(model.name)
    note_offered(s, model, key)
    zones.note_whole(s, model, group, key)
    s.changed.add((model.name, group.replica, key))
    record.total_bytes = sum(copy.memory.total_bytes for copy in kept_copies(s, group, key))
    if not record.was_whole:
        s.log("info", f"model {model.name!r}: version {show(key)} is whole at {group.replica!r}")
    note_was_whole(s, model, record)


def note_was_whole(s: Step, model: ModelState, record: VersionRecord) -> None:
    """Remember that a version was visible."""
    record.was_whole = True
    if model.high is None or record.key > model.high:
        zones.note_newer(s, model, model.high)
        model.high = record.key
    forget_old_versions(s, model)


def note_whole_before(s: Step, group: Group, key: VersionKey) -> None:
    """Record that a version was whole at a replica before the server restarted, though it is being taken back by now.

    All its shards come back with it, and some ask for their memory before the others are there. They held it together
    then: else those would have got their memory back at once.
    """
    states = (CopyState.PUBLISHED, CopyState.DRAINING)
    copies = [w.copy for w in s.members(group) if w.copy is not None and w.copy.key == key and w.copy.state in states]
    if s.state.in_grace(s.now) and len(copies) == group.num_shards:
        model = s.state.models[group.model]
        note_was_whole(s, model, model.versions[key])
        s.changed.add((model.name, group.replica, key))


def note_offered(s: Step, model: ModelState, key: VersionKey) -> None:
    """Look at those who wait if this may be the only replica that offers the version."""
    if len(list(islice(whole_groups(s, model, key), 2))) < 2:
        s.touched.add(model.name)


def unpublish(s: Step, worker: Worker, request: int, _: Unpublish) -> None:
    """Take the worker's copy back; the answer is deferred until it has drained."""
    copy = worker.copy
    if copy is None:
        return s.reply(worker, request, Ok())
    if copy.state is CopyState.FILLING:
        return s.fail(worker, request, StateError("the memory is being filled: nothing is published"))
    if copy.state is CopyState.HELD:
        drop_copy(s, copy, "unpublished")
        return s.reply(worker, request, Ok())
    if worker.unpublish_request is not None and worker.unpublish_request != request:
        s.fail(worker, worker.unpublish_request, StateError("another unpublish() has taken over"))
    if copy.state is CopyState.PUBLISHED:
        copy.state, copy.draining_since_s = CopyState.DRAINING, s.now
        mark_copy(s, worker, copy)
        s.state.draining.add(copy.id)
    worker.unpublish_request, worker.offload_asked, worker.offload_failed = request, None, None
    model = s.model(worker)
    model.stuck.discard(worker.id)
    s.note(worker, copy.key)
    s.touch(worker)


def wait(s: Step, worker: Worker, request: int, m: Wait) -> None:
    """Answer when a newer whole version is available, or when the other shards were promised one."""
    model = s.model(worker)
    newer_than = None if m.newer_than is None else (m.newer_than[0], m.newer_than[1])
    if len(worker.waits) >= s.state.config.max_deferred:  # seldom: only then all that wait are looked at
        worker.waits = {waiting.request for waiting in model.waiting if waiting.worker == worker.id}
    if len(worker.waits) >= s.state.config.max_deferred:
        return s.fail(worker, request, StateError("too many waits at once on one connection"))
    worker.waits.add(request)
    waiting = Waiting(worker.id, request, newer_than)
    model.waiting += tell_promised(s, worker, settle_waits(s, model, [waiting]))


def tell_promised(s: Step, worker: Worker, waiters: list[Waiting]) -> list[Waiting]:
    """Answer a shard that its replica's round waits for with the version that the others were promised.

    Its holder may be taking it back by now, so that nobody else hears of it; this shard still gets it, by joining (L3).
    Else it would wait for a newer one, the round for it, and the holder for the round. Returns who goes on waiting.
    """
    current = None if worker.observer else s.group(worker).open_round()
    if current is None or current.key is None or current.kind == "install" or worker.shard in current.joined:
        return waiters
    keep = []
    for waiting in waiters:
        if waiting.worker == worker.id and (waiting.newer_than is None or current.key > waiting.newer_than):
            note_told(worker, current.key)
            s.reply(worker, waiting.request, Available(*current.key))
        else:
            keep.append(waiting)
    return keep


def settle_waits(s: Step, model: ModelState, waiters: list[Waiting]) -> list[Waiting]:
    """Answer the waiters for whom something newer is available; return those who go on waiting."""
    newest = model.high
    if not waiters or newest is None or s.state.in_grace(s.now) or latest(model) != newest:
        return waiters
    offered = {newest: next(whole_groups(s, model, newest), None) is not None}
    if not offered[newest] and not model.leads:
        return waiters
    keep = []
    for waiting in waiters:
        worker = s.state.workers.get(waiting.worker)
        if worker is None:
            continue
        key = newest_seen(s, worker)
        if key is not None and (waiting.newer_than is None or key > waiting.newer_than):
            if key not in offered:
                offered[key] = next(whole_groups(s, model, key), None) is not None
            if offered[key]:
                note_told(worker, key)
                s.reply(worker, waiting.request, Available(*key))
                continue
        keep.append(waiting)
    return keep


def forget_old_versions(s: Step, model: ModelState) -> None:
    """Forget what nobody holds: versions that never were whole, and whole ones beyond the newest `kept_versions`."""
    kept = s.state.config.kept_versions
    ranked = enumerate(sorted(model.versions, reverse=True))
    old = [k for n, k in ranked if k not in model.holders and (n >= kept or not model.versions[k].was_whole)]
    if old:  # seldom: only then all replicas are looked at
        promised = {r.key for g in model.groups.values() for r in g.rounds.values()}
        for key in set(old) - promised:
            del model.versions[key]
