"""Machines with one decision made wrong, at least one for each law that the server decides; each has its scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tensorhub_core.ids import VersionKey
from tensorhub_core.state import (
    choosing,
    context,
    leases,
    links,
    machine,
    membership,
    reads,
    records,
    resourcing,
    retention,
    rounds,
    sourcing,
    versions,
    zones,
)
from tensorhub_core.state.records import ModelState as Model
from tests.property.state import test_mutants as in_worlds
from tests.walk.scenes import Scene

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A law that is switched off, how, and where the walk meets it."""

    law: str
    switch_off: Patch
    scene: Scene

    @property
    def name(self) -> str:
        """Return the name of its golden trace."""
        return f"{self.law}_{self.switch_off.__name__}"


def a_part_is_offered(patch: pytest.MonkeyPatch) -> None:
    """L1: what some shards of a replica offer may be read, though others have nothing."""
    in_worlds.half_versions_are_whole(patch)


def readers_do_not_hold_the_writer(patch: pytest.MonkeyPatch) -> None:
    """L3: a copy is withdrawn although it is leased."""

    def drains(s: leases.Step) -> None:
        for copy in [s.state.copies[i] for i in sorted(s.state.draining)]:
            holder = s.holder(copy)
            request = leases.end_drain(s, holder, copy)
            leases.drop_copy(s, copy, "unpublished")
            if request is not None:
                s.reply(holder, request, leases.Ok())

    patch.setattr(machine, "settle_drains", drains)


def draining_copies_take_new_readers(patch: pytest.MonkeyPatch) -> None:
    """L3: a copy that is being taken back is promised to rounds that begin only now."""
    patch.setattr(choosing.Look, "leaves", property(lambda self: (False, True)))


def nobody_listens_first(patch: pytest.MonkeyPatch) -> None:
    """L5: a server that was restarted decides at once."""
    patch.setattr(records.ServerState, "in_grace", lambda self, now: False)


def what_is_held_is_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    """L6: shards that hold a version say so to a server that does not listen."""
    patch.setattr(membership, "take_back", lambda s, worker, m: None)


def promises_of_before_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """L6: what a shard was promised before a restart counts for nothing."""
    original = rounds.join

    def join(s: rounds.Step, worker: rounds.Worker, request: int, m: rounds.JoinRound) -> None:
        original(s, worker, request, m)
        current = s.group(worker).rounds.get(m.round)
        if current is not None and worker.shard in current.joined:
            current.joined[worker.shard].promised = None

    patch.setattr(rounds, "join", join)


def promises_of_before_count_for_ever(patch: pytest.MonkeyPatch) -> None:
    """L7: a shard that comes late after a restart still gets what it says it was promised."""
    original = rounds.join

    def join(s: rounds.Step, worker: rounds.Worker, request: int, m: rounds.JoinRound) -> None:
        original(s, worker, request, m)
        current = s.group(worker).rounds.get(m.round)
        if current is not None and worker.shard in current.joined:
            current.joined[worker.shard].promised = m.promised

    patch.setattr(rounds, "join", join)


def ids_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """L8: a server that was restarted gives the same ids again."""

    def new_id(s: context.Step, kind: str) -> str:
        s.state.counter += 1
        return f"{kind}{s.state.counter}"

    patch.setattr(context.Step, "new_id", new_id)


def leases_outlive_their_reader(patch: pytest.MonkeyPatch) -> None:
    """L8: what a process was reading when another took its place stays leased for ever."""
    patch.setattr(membership, "end_lease", lambda s, lease: None)
    patch.setattr(rounds, "end_lease", lambda s, lease: None)


def latest_is_what_there_is(patch: pytest.MonkeyPatch) -> None:
    """L10: when the newest version is gone, an older one is the latest."""
    original = versions.newest_seen

    def newest_seen(s: rounds.Step, worker: rounds.Worker) -> VersionKey | None:
        model = s.model(worker)
        return max((key for key in model.holders if model.versions[key].was_whole), default=original(s, worker))

    patch.setattr(rounds, "newest_seen", newest_seen)


def what_was_heard_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """L10: a restarted server does not remember which versions its clients have heard of."""
    original = membership.hear_high

    def hear_high(s: context.Step, model: Model, m: membership.Hello) -> None:
        original(s, model, m)
        model.heard = None

    patch.setattr(membership, "hear_high", hear_high)


def versions_are_seen_before_they_are_in_the_zone(patch: pytest.MonkeyPatch) -> None:
    """L10: a seed agent holds nothing back from its zone."""
    patch.setattr(zones, "holds_back", lambda s, model, zone, newest: False)


def zones_wait_for_dead_agents(patch: pytest.MonkeyPatch) -> None:
    """L10: a seed agent holds its zone back although it is silent or gone."""
    patch.setattr(zones, "has_agent", lambda s, model, lead: True)


def zones_wait_for_idle_agents(patch: pytest.MonkeyPatch) -> None:
    """L10: a seed agent that brings nothing holds its zone back for ever."""
    patch.setattr(machine.zones, "check_leads", lambda s, model: None)


def nothing_is_retained(patch: pytest.MonkeyPatch) -> None:
    """L11: whoever holds the last copy of the newest version may take it back."""
    patch.setattr(retention, "is_retained", lambda model, record: False)


def a_copy_in_custody_is_withdrawn(patch: pytest.MonkeyPatch) -> None:
    """L11: a holder that has to keep a version need not wait for its offload copy."""
    patch.setattr(leases, "is_kept_back", lambda s, copy: False)


def offload_copies_are_dropped_at_once(patch: pytest.MonkeyPatch) -> None:
    """L11: nobody needs an offload copy."""
    patch.setattr(retention, "is_needed", lambda s, model, copy: False)


def announced_checksums_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """L12: a prefix is offered although nobody has announced what it sums to."""
    patch.setattr(reads, "announced", lambda s, worker, copy, prefix, sums: prefix)


def announced_checksums_outlive_their_source(patch: pytest.MonkeyPatch) -> None:
    """L12: what was verified by the checksums of a copy that is gone is offered on, wherever its holder reads now."""
    patch.setattr(resourcing, "still_stands", lambda s, copy, sources, sums, content: True)


def nobody_waits_for_a_seed(patch: pytest.MonkeyPatch) -> None:
    """Zones: two readers of a zone fetch a version from another zone at once."""
    patch.setattr(sourcing, "awaited_seed", lambda s, reader, current, copies: None)
    patch.setattr(resourcing, "awaited_seed", lambda s, reader, current, copies: None)


def the_index_forgets_who_comes_back(patch: pytest.MonkeyPatch) -> None:
    """Index: a worker that was silent, and is heard again, stays filed like one that is silent."""
    original, mark = membership.suspect, membership.mark

    def suspect(s: membership.Step, worker: membership.Worker) -> None:
        original(s, worker)
        mark(s, worker)

    patch.setattr(membership, "suspect", suspect)
    patch.setattr(membership, "mark", lambda s, worker: None)


def the_index_forgets_who_reads(patch: pytest.MonkeyPatch) -> None:
    """Index: a copy that somebody reads is filed like one that nobody reads."""
    patch.setattr(links, "count", lambda s, lease, number: None)


def copies_outlive_their_round(patch: pytest.MonkeyPatch) -> None:
    """L13: what a broken round has filled so far stays a source."""
    patch.setattr(rounds, "drop_copy", lambda s, copy, reason: None)


_PLAIN = Scene("1 source, 1 reader")
_SMALL = Scene("2 sources, 1 reader", sources=2, shards=1)
_LEFT = Scene("1 source, 1 reader, a round is left", leaves=1, versions=1)
_SILENT = Scene("1 source, 1 reader, one is silent", verify=False, suspicions=1, versions=1)
_CHAIN = Scene("1 source, 2 readers that queue, one dies", 1, 2, 1, 1, queues=True, crashes=1)
_STAGING = Scene("1 source, 1 reader that stages", stages=True, versions=1)
_RESTART = Scene("1 source, 1 reader, the server restarts", shards=1, restarts=1)
_TWO = Scene("1 source, 2 readers", 1, 2, 1, 1)
_RESHARDS = Scene("2 sources, 2 readers that reshard", 2, 2, 1, 1, queues=True, reshards=True, doubts=1)
_ZONES = Scene("2 zones, 2 readers, checksums off", 1, 2, 1, 1, verify=False, zones=True)
_AGENT = Scene("1 source, a seed agent, 1 reader", 1, 2, 1, 1, agents=1, crashes=1, delays=1)
_RETAIN = Scene("1 source, 1 reader, retention", retain=1)

MUTANTS: tuple[Mutant, ...] = (
    Mutant("L01", a_part_is_offered, Scene("2 sources, 1 reader", sources=2, versions=1)),
    Mutant("L01", in_worlds.what_is_staged_counts_as_held, _STAGING),
    Mutant("L02", in_worlds.promise_may_change, Scene("2 sources, 1 reader", sources=2)),
    Mutant("L03", readers_do_not_hold_the_writer, _PLAIN),
    Mutant("L03", draining_copies_take_new_readers, _TWO),
    Mutant("L03", in_worlds.unstage_at_once, Scene("1 source, 2 readers that stage", 1, 2, 1, 1, stages=True)),
    Mutant("L04", in_worlds.done_is_not_checked, _SILENT),
    Mutant("L04", in_worlds.suspected_keep_leases, _SILENT),
    Mutant("L05", nobody_listens_first, _RESTART),
    Mutant("L06", what_is_held_is_not_taken_back, _RESTART),
    Mutant("L06", promises_of_before_are_forgotten, _RESTART),
    Mutant(
        "L07", promises_of_before_count_for_ever, Scene("1 source, 2 readers, one is given up", 1, 2, 1, 1, burials=1)
    ),
    Mutant("L08", ids_begin_anew, Scene("1 source, 1 reader, the server restarts", versions=1, restarts=1)),
    Mutant("L08", leases_outlive_their_reader, Scene("1 source, 1 reader, one dies", crashes=1, versions=1)),
    Mutant("L10", latest_is_what_there_is, _SMALL),
    Mutant("L10", what_was_heard_is_forgotten, _RESTART),
    Mutant("L10", versions_are_seen_before_they_are_in_the_zone, _AGENT),
    Mutant("L10", zones_wait_for_dead_agents, _AGENT),
    Mutant("L10", zones_wait_for_idle_agents, _AGENT),
    Mutant("L11", nothing_is_retained, _RETAIN),
    Mutant("L11", a_copy_in_custody_is_withdrawn, _RETAIN),
    Mutant("L11", offload_copies_are_dropped_at_once, _RETAIN),
    Mutant("L12", in_worlds.unverified_prefixes, _PLAIN),
    Mutant("L12", in_worlds.manifests_do_not_bind, _PLAIN),
    Mutant("L12", announced_checksums_are_not_waited_for, _RESHARDS),
    Mutant("L12", announced_checksums_outlive_their_source, _RESHARDS),
    Mutant("L13", in_worlds.commit_shard_by_shard, _PLAIN),
    Mutant("L13", copies_outlive_their_round, _LEFT),
    Mutant("L13", in_worlds.install_before_all_have_staged, _STAGING),
    Mutant("L14", in_worlds.circles, _CHAIN),
    Mutant("zones", nobody_waits_for_a_seed, _ZONES),
    Mutant("index", the_index_forgets_who_comes_back, _SILENT),
    Mutant("index", the_index_forgets_who_reads, _PLAIN),
    Mutant("L14", in_worlds.others_may_be_unfinished, Scene("2 sources, 2 readers, one dies", 2, 2, 1, 1, crashes=1)),
)
