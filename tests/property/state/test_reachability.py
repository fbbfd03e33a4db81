"""Fleets in which some machines cannot reach others: whoever can be served is, and nobody tries again what is known."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tensorhub_core.ids import WorkerId
from tensorhub_core.state import sourcing
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Committed,
    Done,
    Failure,
    Filling,
    LeaseFailure,
    LeaseLost,
    LeaveRound,
    Ok,
    Promise,
    Published,
    Relocate,
    Reply,
    Unpublish,
)
from tensorhub_core.state.records import CopyState
from tests.sim.hub import Hub, Peer

READERS = 4
TRAINER = 0
ROUNDS_OF_PATIENCE = 40
pairs = st.tuples(st.integers(0, READERS), st.integers(0, READERS)).filter(lambda pair: pair[0] != pair[1])


class Elsewhere:
    """A worker that the server does not know."""

    id, host, rail = WorkerId("gone"), "", ""


class Fleet:
    """A trainer (host 0) and readers on hosts of their own; `cut` holds (reader, source) that lose all packets."""

    def __init__(self, cut: set[tuple[int, int]], small: bool) -> None:
        self.cut = cut
        self.hub = Hub(worth_waiting_bytes=1 << 40 if small else 1)
        self.peers = [self.hub.hello(f"r{k}", host=f"host {k}", rail="nic") for k in range(READERS + 1)]
        for peer in self.peers:
            peer.register(b"layout")
        self.rounds = [0] * (READERS + 1)
        self.tried: list[tuple[int, int]] = []
        self.version = 0

    def publish(self) -> None:
        self.version += 1
        for peer in self.peers:
            if self.hub.state.workers[self.hub.state.sessions[peer.session]].copy is not None:
                peer.call(Unpublish(), Ok)
        self.peers[TRAINER].publish(self.version, b"sums %d" % self.version, Published)

    def servable(self) -> set[int]:
        """Return the readers that a chain of machines leads to."""
        have = {TRAINER}
        while more := {
            k for k in range(READERS + 1) if k not in have and any((k, source) not in self.cut for source in have)
        }:
            have |= more
        return have - {TRAINER}

    def run(self, order: list[int]) -> set[int]:
        """Let all readers ask for the version, again when they are refused; return who got it."""
        asked = {k: self.ask(k) for k in order}
        reading: dict[int, Promise] = {}
        done: set[int] = set()
        for _ in range(ROUNDS_OF_PATIENCE):
            for k in order:
                peer, reply = self.peers[k], self.peers[k].answers.get(asked[k])
                if k in done or reply is None:
                    continue
                if k in reading and self.lost(k, reading[k]):
                    failure = LeaseFailure(reading.pop(k).sources[0].lease, "lost")
                    asked[k] = peer.ask(Relocate(self.rounds[k], (failure,)))
                    continue
                if k in reading:
                    self.finish(k, reading, asked, done)
                elif isinstance(reply, Failure):
                    self.rounds[k] += 1
                    asked[k] = self.ask(k)
                else:
                    self.take(k, peer, reply, reading, asked)
                assert check(self.hub.state) == []
            self.hub.later(0.5)
        for k in set(order) - done:
            self.peers[k].call(LeaveRound(self.rounds[k], "deadline_exceeded", "no time left"), Ok)
            self.rounds[k] += 1
        return done

    def lost(self, k: int, promise: Promise) -> bool:
        return any(push.lease == promise.sources[0].lease for push in self.peers[k].pushed(LeaseLost))

    def ask(self, k: int) -> int:
        return self.peers[k].join(self.rounds[k], self.version, mode="update")

    def take(self, k: int, peer: Peer, reply: Reply, reading: dict[int, Promise], asked: dict[int, int]) -> None:
        assert isinstance(reply, Promise)
        source = int(reply.sources[0].replica[1:])
        if (k, source) in self.cut:
            if (k, source) in self.tried:
                self.check_no_other_way(k)
            if reply.sources[0].lease in self.hub.state.leases:  # else the server knows that there is nothing any more
                self.tried.append((k, source))
            failure = LeaseFailure(reply.sources[0].lease, "unreachable", "no answer")
            asked[k] = peer.ask(Relocate(self.rounds[k], (failure,)))
        else:
            peer.call(Filling(self.rounds[k]), Ok)
            reading[k] = reply

    def check_no_other_way(self, k: int) -> None:
        """A machine that is known to be out of reach is tried only if nobody within reach holds the version."""
        for worker in self.hub.state.workers.values():
            other = int(worker.replica[1:])
            whole = worker.copy is not None and worker.copy.key[1] == self.version
            if whole and worker.copy is not None and worker.copy.state is CopyState.PUBLISHED:
                assert other == k or (k, other) in self.cut, f"r{k} tries again although r{other} has it"

    def finish(self, k: int, reading: dict[int, Promise], asked: dict[int, int], done: set[int]) -> None:
        """End a read if its source has everything."""
        source = int(reading[k].sources[0].replica[1:])
        if source != TRAINER and source not in done:
            return
        self.peers[k].call(Done(self.rounds[k], self.peers[k].put(b"sums %d" % self.version)), Committed)
        self.rounds[k] += 1
        done.add(k)


def three_versions(fleet: Fleet, order: list[int]) -> None:
    """Publish three versions, and let readers ask for each in another order."""
    for version in range(3):
        fleet.publish()
        assert fleet.run(order[version:] + order[:version]) == fleet.servable()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@example({(4, 0), (4, 1), (4, 2), (4, 3)}, [1, 2, 4, 3], False)  # nobody may queue behind one that reaches nobody
@given(st.sets(pairs, max_size=10), st.permutations(range(1, READERS + 1)), st.booleans())
def test_all_get_it_that_can_and_nothing_known_is_tried_in_vain(
    cut: set[tuple[int, int]], order: list[int], small: bool
) -> None:
    three_versions(Fleet(cut, small), order)


@pytest.mark.parametrize("remembers", [True, False])
def test_without_the_memory_of_it_the_same_is_tried_again(remembers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not remembers:
        monkeypatch.setattr(sourcing, "out_of_reach", lambda *_: set())
        monkeypatch.setattr(sourcing, "holds", lambda *_: False)
    fleet = Fleet({(1, TRAINER)}, small=True)
    three_versions(fleet, [1, 2, 3, 4])
    assert (fleet.tried.count((1, TRAINER)) == 1) == remembers


def test_a_witness_that_is_gone_is_noticed() -> None:
    state = Fleet(set(), small=True).hub.state
    one, other = list(state.workers.values())[:2]
    state.reachability.learn(one, other, 0.0)
    assert check(state) == []
    state.reachability.learn(one, Elsewhere(), 0.0)
    assert [line for line in check(state) if "a worker that is gone" in line]
