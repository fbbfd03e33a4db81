"""Break one promise of the server machine at a time: the random worlds must notice each (else they prove nothing)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub_core.ids import CopyId, ModelName, ReplicaName, VersionKey
from tensorhub_core.state import (
    calling,
    candidates,
    choosing,
    index,
    keeping,
    leases,
    machine,
    membership,
    reads,
    retention,
    rounds,
    staging,
    versions,
)
from tensorhub_core.state.shelves import Slot
from tests.sim.hasty import HastyWorld
from tests.sim.world import World

Patch = Callable[[pytest.MonkeyPatch], None]


def withdraw_at_once(patch: pytest.MonkeyPatch) -> None:
    """L3: a copy is withdrawn although it is leased."""

    def drains(s: leases.Step) -> None:
        for copy_id in sorted(s.state.draining):
            holder = s.holder(s.state.copies[copy_id])
            request, holder.unpublish_request = holder.unpublish_request, None
            for lease in sorted(s.state.copies[copy_id].leases):
                s.state.copies[copy_id].leases.discard(lease)
            s.state.draining.discard(copy_id)
            s.state.copies.pop(copy_id)
            holder.copy = None
            if request is not None:
                s.reply(holder, request, leases.Ok())

    patch.setattr(machine, "settle_drains", drains)


def done_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    """L4: bytes count although the leases did not stand."""
    patch.setattr(reads, "leases_stand", lambda s, current, shard: True)


def others_may_be_unfinished(patch: pytest.MonkeyPatch) -> None:
    """L14: beside the best source any other one is read, also one that is still filling."""

    def more(look: choosing.Look, best: Slot) -> list[CopyId]:
        everything = [c.id for c in look.s.state.copies.values() if (c.key, c.memory.layout) == (look.key, best.layout)]
        return [name for name in everything if name != best.copy and look.may_read(name)]

    patch.setattr(choosing, "more_copies", more)


def suspected_keep_leases(patch: pytest.MonkeyPatch) -> None:
    """L4: a silent reader keeps its leases."""

    def suspect(s: membership.Step, worker: membership.Worker) -> None:
        worker.suspected = True
        membership.mark(s, worker)

    patch.setattr(membership, "suspect", suspect)


def half_versions_are_whole(patch: pytest.MonkeyPatch) -> None:
    """L1: a version is offered before all its shards are published."""

    def offered(s: index.Step, group: index.Group, key: VersionKey, silent: bool = False) -> object:
        copies = [copy for w in s.members(group) if (copy := w.copy_of(key, index.OFFERED)) is not None]
        return (any(copy.state is index.CopyState.DRAINING for copy in copies), copies) if copies else None

    patch.setattr(index, "offered_by", offered)
    patch.setattr(choosing, "offered_by", offered)


def promise_may_change(patch: pytest.MonkeyPatch) -> None:
    """L2: a shard that joins late gets what is latest then."""
    told = rounds.tell_promise

    def tell(s: rounds.Step, worker: rounds.Worker, current: rounds.Round) -> None:
        current.key = versions.latest(s.model(worker)) or current.key
        told(s, worker, current)

    patch.setattr(rounds, "tell_promise", tell)


def commit_shard_by_shard(patch: pytest.MonkeyPatch) -> None:
    """L13: a shard is told that it committed before the others are done."""
    original = reads.done

    def done(s: reads.Step, worker: reads.Worker, request: int, m: reads.Done) -> None:
        original(s, worker, request, m)
        current = s.group(worker).rounds.get(m.round)
        joined = None if current is None else current.joined.get(worker.shard)
        if joined is not None and joined.done_request == request:
            s.push(worker, reads.Committed(m.round, True))

    patch.setattr(reads, "done", done)


def circles(patch: pytest.MonkeyPatch) -> None:
    """L14: readers may follow each other."""
    patch.setattr(candidates, "leads_to", lambda s, copy, reader: False)


def unverified_prefixes(patch: pytest.MonkeyPatch) -> None:
    """L12: an unfinished copy offers more than it has verified."""
    original = reads.filling

    def filling(s: reads.Step, worker: reads.Worker, request: int, m: reads.Filling) -> None:
        original(s, worker, request, m)
        if worker.copy is not None and worker.copy.state is reads.CopyState.FILLING:
            worker.copy.prefix = 1

    patch.setattr(reads, "filling", filling)


def manifests_do_not_bind(patch: pytest.MonkeyPatch) -> None:
    """L12: a version may have other bytes than its first manifest."""

    def put(*args: object, **kwargs: object) -> None:
        original(*args, **kwargs)  # type: ignore[arg-type]
        args[1].copy.sums = b"other"  # type: ignore[attr-defined]

    original = versions.put_copy
    patch.setattr(versions, "put_copy", put)


def install_before_all_have_staged(patch: pytest.MonkeyPatch) -> None:
    """L13: the first shard that wants to install may overwrite its memory."""

    def install(s: rounds.Step, group: rounds.Group, current: rounds.Round) -> None:
        current.key = next(joined.have for joined in current.joined.values())
        rounds.keep_promise(s, group, current)

    patch.setattr(rounds, "try_install", install)


def unstage_at_once(patch: pytest.MonkeyPatch) -> None:
    """L3: a staged copy is dropped although it is leased."""

    def unstage(s: staging.Step, worker: staging.Worker, request: int, m: staging.Unstage) -> None:
        copy = worker.staged
        if copy is not None and copy.state is staging.CopyState.PUBLISHED:
            s.reply(worker, request, staging.Ok())
            worker.unstage_request = None
            return
        original(s, worker, request, m)

    original = staging.unstage
    patch.setattr(staging, "unstage", unstage)


def what_is_staged_counts_as_held(patch: pytest.MonkeyPatch) -> None:
    """L1: a version that only waits in staging memory passes for one that the worker holds."""
    original = rounds.holds

    def holds(worker: rounds.Worker, current: rounds.Round, key: rounds.VersionKey) -> bool:
        return original(worker, current, key) or any(c.key == key for c in worker.copies())

    patch.setattr(rounds, "holds", holds)


def no_offload_copy_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    """L11: the last holder of a retained version lets it go."""
    patch.setattr(retention, "is_free", lambda s, model, group, record: True)


def an_offload_copy_goes_when_anything_newer_is_whole(patch: pytest.MonkeyPatch) -> None:
    """L11: an offload copy is dropped before enough newer versions are safe."""
    original = retention.is_needed

    def is_needed(s: retention.Step, model: retention.ModelState, copy: retention.Copy) -> bool:
        newer = any(record.was_whole for key, record in model.versions.items() if key > copy.key)
        return original(s, model, copy) and not newer

    patch.setattr(retention, "is_needed", is_needed)


def spot_workers_are_relied_on(patch: pytest.MonkeyPatch) -> None:
    """L11: a spot replica counts as reliable."""
    for module in (keeping, retention):
        patch.setattr(module, "is_reliable", keeping.is_lively)


def who_withdraws_is_relied_on(patch: pytest.MonkeyPatch) -> None:
    """L11: a replica that is withdrawing the version itself protects it."""

    def is_protected(
        s: retention.Step,
        model: retention.ModelState,
        group: retention.Group,
        record: retention.VersionRecord,
        by_custody: bool = False,
    ) -> bool:
        others = record.keeping.held - {group.replica}
        return any(keeping.is_reliable(s, model.groups[other]) for other in others)

    patch.setattr(retention, "is_protected", is_protected)


def one_shard_of_another_replica_is_relied_on(patch: pytest.MonkeyPatch) -> None:
    """L11: the verdict is taken as if a shard elsewhere were the whole replica."""
    original = retention.is_free

    def is_free(
        s: retention.Step, model: retention.ModelState, group: retention.Group, record: retention.VersionRecord
    ) -> bool:
        others = [g for g in model.groups.values() if g is not group and keeping.is_reliable(s, g)]
        published = [w.copy_of(record.key, (retention.CopyState.PUBLISHED,)) for g in others for w in s.members(g)]
        return original(s, model, group, record) or any(published)

    patch.setattr(retention, "is_free", is_free)


def publishers_secure_their_own_versions(patch: pytest.MonkeyPatch) -> None:
    """L11: a version counts as safe as soon as it is whole at its publisher."""

    def review(s: retention.Step, name: ModelName, replica: ReplicaName, key: VersionKey) -> None:
        original(s, name, replica, key)
        record = s.state.models[name].versions.get(key)
        if record is not None and record.keeping.whole and record.keeping.secured_by is None:
            record.keeping.secured_by = min(record.keeping.whole)

    original = retention.review
    patch.setattr(retention, "review", review)


def anything_newer_replaces(patch: pytest.MonkeyPatch) -> None:
    """L11: a version is released as soon as a newer one is whole anywhere."""
    patch.setattr(retention, "replaces", lambda newer, old: bool(newer.keeping.whole))


def nobody_is_known_to_wait(patch: pytest.MonkeyPatch) -> None:
    """L2: the index of the replicas whose rounds wait for others forgets each that was looked at."""
    patch.setattr(calling, "waits_for_others", lambda group: False)


def who_is_failed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """L3, L4: the index does not hear of a reader that has lost its sources, or waits for silent ones."""
    patch.setattr(calling, "note_call", lambda s, worker: None)


def spot_replicas_are_held_for_firm(patch: pytest.MonkeyPatch) -> None:
    """L11: what a replica holds is noted as if it were not spot."""

    def review(s: retention.Step, name: ModelName, replica: ReplicaName, key: VersionKey) -> None:
        original(s, name, replica, key)
        record = s.state.models[name].versions.get(key)
        if record is not None and replica in record.keeping.held:
            record.keeping.firm.add(replica)

    original = retention.review
    patch.setattr(retention, "review", review)


RETENTION_MUTANTS = [
    no_offload_copy_is_asked_for,
    an_offload_copy_goes_when_anything_newer_is_whole,
    spot_workers_are_relied_on,
    who_withdraws_is_relied_on,
    one_shard_of_another_replica_is_relied_on,
    publishers_secure_their_own_versions,
    anything_newer_replaces,
    spot_replicas_are_held_for_firm,
]

STAGING_MUTANTS = [
    install_before_all_have_staged,
    unstage_at_once,
    what_is_staged_counts_as_held,
]

MUTANTS: list[Patch] = [
    withdraw_at_once,
    done_is_not_checked,
    others_may_be_unfinished,
    suspected_keep_leases,
    half_versions_are_whole,
    promise_may_change,
    commit_shard_by_shard,
    circles,
    unverified_prefixes,
    manifests_do_not_bind,
    nobody_is_known_to_wait,
    who_is_failed_is_forgotten,
    *STAGING_MUTANTS,
    *RETENTION_MUTANTS,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_worlds_notice(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in range(400):
        shape, stages = [(2, 2, 1), (3, 1, 2), (4, 1, 1)][seed % 3], mutant in STAGING_MUTANTS
        retain = 1 + seed % 2 if mutant in RETENTION_MUTANTS else None
        kind = HastyWorld if mutant is what_is_staged_counts_as_held else World
        world = kind(seed, *shape, checksums=seed % 2 == 0, stages=stages, retain=retain, places=False)
        world.keeper.parts.rate = 0  # none of these is about parts: what they break comes sooner
        try:
            for _ in range(3_000):
                world.advance()
        except (AssertionError, KeyError):
            return
    pytest.fail("no world noticed")
