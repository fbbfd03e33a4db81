"""Break one promise of the product at a time, on either side: the simulated worlds must notice each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tensorhub_core.client import drain, machine, moves, resources, seeding, session, verifier
from tensorhub_core.client.drain import Drain
from tensorhub_core.state import leases, membership, reads, resourcing, rounds, sourcing, zones
from tensorhub_core.state import machine as server
from tests.sim import dataplane

Patch = Callable[[pytest.MonkeyPatch], None]


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """L9: after a fence, reads from before it go on."""

    def fence(self: dataplane.SimTransport) -> None:
        self._reads.clear()
        self._peers.clear()
        self._poisoned = False

    patch.setattr(dataplane.SimTransport, "fence", fence)


def done_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    """L4: bytes count although the leases did not stand, and nobody compares them."""
    patch.setattr(reads, "leases_stand", lambda s, current, shard: True)
    no_checksums(patch)


def no_checksums(patch: pytest.MonkeyPatch) -> None:
    """L12: what has landed is right."""
    patch.setattr(verifier.Checker, "_digests", lambda self, landed, indices: self._expected[indices])


def cuts_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """L12: what has landed of a part of a segment is right."""
    digests = verifier.Checker._digests

    def of_segments(self: Any, landed: Any, indices: Any) -> Any:
        cut = self._schedule.cut[indices] >= 0
        return np.where(cut, self._expected[indices], digests(self, landed, indices))

    patch.setattr(verifier.Checker, "_digests", of_segments)


def heartbeats_renew_nothing(patch: pytest.MonkeyPatch) -> None:
    """L4: only other requests show that a worker lives."""
    heard = membership.heard_from

    def heard_from(s: Any, worker: Any) -> None:
        seen = worker.last_seen_s
        heard(s, worker)
        worker.last_seen_s = seen

    patch.setattr(membership, "heard_from", heard_from)


def nothing_is_held(patch: pytest.MonkeyPatch) -> None:
    """L7: a worker does not tell a restarted server what it holds."""
    original = session.hello_of

    def hello_of(*args: Any, **more: Any) -> Any:
        return msgspec.structs.replace(original(*args, **more), held=None)

    patch.setattr(session, "hello_of", hello_of)


def overwrite_at_once(patch: pytest.MonkeyPatch) -> None:
    """L3: an update fills the memory while its old copy is still leased."""
    proceed = moves.proceed

    def hurry(s: Any) -> None:
        published, s.state.published = s.state.published, False
        proceed(s)
        s.state.published = published

    patch.setattr(machine, "proceed", hurry)


def unpublish_returns_at_once(patch: pytest.MonkeyPatch) -> None:
    """L3: a caller gets its memory back before the server has answered."""
    begin = Drain.begin

    def hurry(self: Drain) -> Any:
        begun = begin(self)[1]
        instant: Any = drain.Future()
        instant.set_result(leases.Ok())
        return instant, begun

    patch.setattr(Drain, "begin", hurry)


def drains_forget_leases(patch: pytest.MonkeyPatch) -> None:
    """L3: the server withdraws a copy that is leased."""

    def settle(s: Any) -> None:
        for copy_id in sorted(s.state.draining):
            copy = s.state.copies[copy_id]
            holder = s.holder(copy)
            name = "unstage_request" if copy is holder.staged else "unpublish_request"
            request = getattr(holder, name)
            setattr(holder, name, None)
            leases.drop_copy(s, copy, "unpublished")
            if request is not None:
                s.reply(holder, request, leases.Ok())

    patch.setattr(server, "settle_drains", settle)
    no_checksums(patch)


def commit_shard_by_shard(patch: pytest.MonkeyPatch) -> None:
    """L13: a round that breaks is over only for who broke it."""
    patch.setattr(reads, "abort", lambda s, group, current, error, told=None: None)
    patch.setattr(rounds, "abort", lambda s, group, current, error, told=None: None)


def reads_are_not_stopped(patch: pytest.MonkeyPatch) -> None:
    """L9: a call that fails does not wait for its read to end."""

    def fail(s: Any, error: BaseException) -> None:
        s.end(moves.End(error=error, dirty=s.state.touched, uncertain=bool(s.state.done_asked)))

    patch.setattr(moves, "fail", fail)
    patch.setattr(machine, "fail", fail)


def forgets_its_blobs(patch: pytest.MonkeyPatch) -> None:
    """L7: what a worker holds comes back, but nobody can find out where it lies."""
    stand = resources.Resources.stand

    def bare(self: Any, *args: Any) -> None:
        stand(self, *args)
        self.session.standing = dataclasses.replace(self.session.standing, blobs=())

    patch.setattr(resources.Resources, "stand", bare)


def deadlines_pass_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """A call ends long after its deadline."""
    original = machine.tick

    def tick(s: Any) -> None:
        s.now -= 30.0
        original(s)
        if s.state.deadline_s is not None and s.state.give_up_s is None:
            s.state.deadline_s += 5.0

    patch.setattr(machine, "tick", tick)


def prefix_before_verified(patch: pytest.MonkeyPatch) -> None:
    """L12: a server takes what a filling copy announces for more than it said, and nobody compares."""
    original = reads.announce

    def announce(s: Any, worker: Any, request: int, m: Any) -> None:
        original(s, worker, request, msgspec.structs.replace(m, prefix=m.prefix + 2 if m.prefix else 0))

    patch.setattr(server.reads, "announce", announce)
    no_checksums(patch)


def versions_are_seen_before_they_are_in_the_zone(patch: pytest.MonkeyPatch) -> None:
    """L10: nobody waits for what a seed agent is bringing."""
    patch.setattr(zones, "holds_back", lambda s, model, zone, newest: False)


def zones_wait_for_dead_agents(patch: pytest.MonkeyPatch) -> None:
    """L10: an agent that was there once is waited for."""
    patch.setattr(zones, "has_agent", lambda s, model, lead: True)


def zones_wait_for_idle_agents(patch: pytest.MonkeyPatch) -> None:
    """L10: an agent that brings nothing is waited for."""
    patch.setattr(zones, "check_leads", lambda s, model: None)


def nobody_waits_for_a_seed(patch: pytest.MonkeyPatch) -> None:
    """All agents of a zone read a version across."""
    patch.setattr(sourcing, "awaited_seed", lambda s, reader, current, copies: None)
    patch.setattr(resourcing, "awaited_seed", lambda s, reader, current, copies: None)


def agents_try_only_once(patch: pytest.MonkeyPatch) -> None:
    """An agent goes on with nothing after the first version that it could not get."""

    def pause(self: seeding.Seeder, seconds: float) -> None:
        while not self._stopped():
            seeding.time.sleep(1.0)

    patch.setattr(seeding.Seeder, "_pause", pause)


SERVER_SIDE: tuple[Patch, ...] = (
    *(heartbeats_renew_nothing, drains_forget_leases, commit_shard_by_shard, prefix_before_verified),
)
CLIENT_SIDE: tuple[Patch, ...] = (
    *(no_fence, done_is_not_asked, no_checksums, cuts_are_not_compared, nothing_is_held, overwrite_at_once),
    *(unpublish_returns_at_once, reads_are_not_stopped, forgets_its_blobs, deadlines_pass_unnoticed),
)
AGENTS: tuple[Patch, ...] = (
    *(versions_are_seen_before_they_are_in_the_zone, zones_wait_for_dead_agents, zones_wait_for_idle_agents),
    *(nobody_waits_for_a_seed, agents_try_only_once),
)
"""Noticed in worlds with seed agents."""
MUTANTS = {patch.__name__: patch for patch in (*SERVER_SIDE, *CLIENT_SIDE, *AGENTS)}
