"""Machines that cannot reach each other are learnt, avoided in later rounds, and forgotten again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_core.ids import WorkerId
from tensorhub_core.state import reachability
from tensorhub_core.state.invariants import check
from tensorhub_core.state.messages import (
    Committed,
    Done,
    Failure,
    Filling,
    LeaseFailure,
    Leave,
    Ok,
    Promise,
    Published,
    Relocate,
    Unpublish,
)
from tensorhub_core.state.reachability import FORGET_S, MOST_PAIRS, Reachability
from tensorhub_core.state.reaching import HOLD_S
from tests.sim.hub import Hub, Peer

A = b"layout a"


@dataclass(frozen=True)
class At:
    """A worker somewhere."""

    id: WorkerId
    host: str = ""
    rail: str = ""


def at(name: str, host: str = "", rail: str = "") -> At:
    return At(WorkerId(name), host, rail)


R, S = at("r", "one", "0"), at("s", "two", "0")


def test_a_neighbour_is_spared_the_attempt_another_nic_is_not() -> None:
    known = Reachability()
    known.learn(R, S, 0.0)
    assert known.apart(R, S, 1.0)
    assert known.apart(at("r2", "one", "0"), at("s2", "two", "0"), 1.0)
    assert not known.apart(at("r3", "one", "1"), S, 1.0)
    assert not known.apart(R, at("s3", "two", "1"), 1.0)
    assert not known.apart(S, R, 1.0), "the other direction is another matter"
    assert known.any_from(at("r2", "one", "0"))
    assert not known.any_from(S)


@pytest.mark.parametrize("reader", [at("r"), at("r", "two", "0")])
def test_where_machines_are_not_known_or_the_same_only_the_workers_are_meant(reader: At) -> None:
    known = Reachability()
    known.learn(reader, S, 0.0)
    assert known.apart(reader, S, 1.0)
    assert known.any_from(reader)
    assert not known.apart(reader, at("other", S.host, S.rail), 1.0)
    assert not known.apart(at("other", reader.host, reader.rail), S, 1.0)


def test_a_pair_is_forgotten_after_a_time_and_when_it_is_read_or_its_witness_goes() -> None:
    known = Reachability()
    known.learn(R, S, 0.0)
    assert known.apart(R, S, FORGET_S - 1)
    assert not known.apart(R, S, FORGET_S)
    for end in (lambda: known.reached(R, S), lambda: known.forget(R.id), lambda: known.forget(S.id)):
        known.learn(R, S, FORGET_S)
        assert known.apart(R, S, FORGET_S)
        end()
        assert not known.apart(R, S, FORGET_S)
        assert (known.pairs, known.readers) == ({}, {})


def test_it_is_bounded_and_what_was_learnt_last_stays() -> None:
    known = Reachability()
    for k in range(MOST_PAIRS + 10):
        known.learn(R, at(f"s{k}", f"host {k}"), 1.0)
    assert len(known.pairs) == MOST_PAIRS
    assert not known.apart(R, at("s9", "host 9"), 2.0)
    assert known.apart(R, at("s10", "host 10"), 2.0)
    known.learn(R, S, 1.0 + FORGET_S)
    assert list(known.pairs) == [(("one", "0"), ("two", "0"))], "the others are over"


workers = st.builds(
    lambda k, host: at(f"w{k}", host, f"nic {k % 2}"), st.integers(0, 5), st.sampled_from(["", "a", "b", "c"])
)
calls = st.tuples(st.sampled_from(["learn", "reached", "forget"]), workers, workers, st.floats(0, 400))


@given(st.lists(calls, max_size=40))
def test_it_knows_what_a_list_of_all_that_happened_says(events: list[tuple[str, At, At, float]]) -> None:
    known, now = Reachability(), 0.0
    told: dict[object, tuple[WorkerId, WorkerId, float]] = {}
    for what, reader, source, later in events:
        now += later
        pair = reachability.pair_of(reader, source)
        if what == "learn":
            known.learn(reader, source, now)
            told[pair] = (reader.id, source.id, now + FORGET_S)
        elif what == "reached":
            known.reached(reader, source)
            told.pop(pair, None)
        else:
            known.forget(reader.id)
            told = {k: v for k, v in told.items() if reader.id not in v[:2]}
        assert known.apart(reader, source, now) == (pair in told and told[pair][2] > now)
        assert sum(known.readers.values()) == len(known.pairs)
        assert all(known.any_from(reader) for _ in range(1) if known.apart(reader, source, now))


class Three:
    """A trainer, a reader on a machine that cannot reach the trainer's, and one on a machine that reaches both."""

    def __init__(self) -> None:
        self.hub = Hub(worth_waiting_bytes=1)
        self.trainer = self.worker("trainer")
        self.cut_off = self.worker("cut off")
        self.between = self.worker("between")
        self.rounds = {"cut off": 0, "between": 0}
        self.trainer.publish(1, b"sums 1", Published)

    def worker(self, name: str, host: str = "") -> Peer:
        peer = self.hub.hello(name, host=host or f"host of {name}", rail="nic")
        peer.register(A)
        return peer

    def begin(self, reader: Peer) -> int:
        return reader.join(self.rounds[reader.name[:-2]], mode="update")

    def source(self, reader: Peer, asked: int) -> str:
        return reader.answer(asked, Promise).sources[0].replica

    def fail(self, reader: Peer, asked: int) -> int:
        """Say that the source cannot be reached."""
        lease = reader.answer(asked, Promise).sources[0].lease
        number = self.rounds[reader.name[:-2]]
        return reader.ask(Relocate(number, (LeaseFailure(lease, "unreachable", "10.0.0.1:5: no answer"),)))

    def finish(self, reader: Peer, version: int) -> None:
        number = self.rounds[reader.name[:-2]]
        reader.call(Done(number, reader.put(b"sums %d" % version)), Committed)
        self.rounds[reader.name[:-2]] += 1
        assert check(self.hub.state) == []

    def next_version(self, version: int) -> None:
        for peer in (self.cut_off, self.between):
            peer.call(Unpublish(), Ok)
        self.trainer.call(Unpublish(), Ok)
        self.trainer.publish(version, b"sums %d" % version, Published)


@pytest.fixture
def three() -> Three:
    """Version 1 came to both readers; the one that is cut off tried the trainer once."""
    t = Three()
    asked = t.begin(t.cut_off)
    assert t.source(t.cut_off, asked) == "trainer", "nobody knows yet"
    between = t.begin(t.between)
    assert t.source(t.between, between) in ("trainer", "cut off")
    if t.source(t.between, between) == "cut off":
        lease = t.between.answer(between, Promise).sources[0].lease
        again = t.between.call(Relocate(0, (LeaseFailure(lease, "slow"),)), Promise)
        assert again.sources[0].replica == "trainer"
    t.between.call(Filling(0), Ok)
    moved = t.fail(t.cut_off, asked)
    assert t.source(t.cut_off, moved) == "between"
    t.cut_off.call(Filling(0), Ok)
    t.finish(t.between, 1)
    t.finish(t.cut_off, 1)
    return t


def test_in_later_versions_the_source_is_not_tried_again(three: Three) -> None:
    for version in range(2, 5):
        three.next_version(version)
        between, asked = three.begin(three.between), three.begin(three.cut_off)
        assert three.source(three.between, between) == "trainer"
        assert three.source(three.cut_off, asked) == "between", "queues behind who can be reached"
        for peer, round_number in ((three.between, version - 1), (three.cut_off, version - 1)):
            peer.call(Filling(round_number), Ok)
        three.finish(three.between, version)
        three.finish(three.cut_off, version)


def test_who_asks_first_waits_a_moment_for_somebody_between(three: Three) -> None:
    three.next_version(2)
    asked = three.begin(three.cut_off)
    assert asked not in three.cut_off.answers
    three.hub.later(HOLD_S / 3)
    between = three.begin(three.between)
    assert three.source(three.between, between) == "trainer"
    three.hub.later(HOLD_S / 3)
    assert three.source(three.cut_off, asked) == "between"


def test_the_only_way_left_is_tried_again_once_in_each_round(three: Three) -> None:
    three.next_version(2)
    asked = three.begin(three.cut_off)
    three.hub.later(HOLD_S + 1)
    assert three.source(three.cut_off, asked) == "trainer"
    refused = three.cut_off.answer(three.fail(three.cut_off, asked), Failure)
    assert refused.code == "version_unavailable"
    for part in ("unreachable", "10.0.0.1:5", "'host of cut off'", "'host of trainer'", "--interface"):
        assert part in refused.message
    three.rounds["cut off"] += 1
    asked = three.begin(three.cut_off)
    three.hub.later(HOLD_S + 1)
    assert three.source(three.cut_off, asked) == "trainer"
    three.cut_off.call(Filling(2), Ok)
    three.finish(three.cut_off, 2)
    assert three.hub.state.reachability.pairs == {}, "it was reached"


def test_without_anybody_else_it_is_tried_at_once(three: Three) -> None:
    three.next_version(2)
    three.between.call(Unpublish(), Ok)
    three.between.ask(Leave())
    asked = three.begin(three.cut_off)
    assert three.source(three.cut_off, asked) == "trainer"


def test_a_trainer_that_comes_back_is_tried_anew(three: Three) -> None:
    back = three.worker("trainer")
    assert three.hub.state.reachability.pairs == {}, "it may have been the process, not the network"
    back.publish(2, b"sums 2", Published)
    for peer in (three.cut_off, three.between):
        peer.call(Unpublish(), Ok)
    asked = three.begin(three.cut_off)
    assert three.source(three.cut_off, asked) == "trainer"


def test_a_silent_source_is_not_taken_for_a_network() -> None:
    t = Three()
    asked = t.begin(t.cut_off)
    t.hub.later(t.hub.config.lease_s + 0.5, silent=(t.trainer,))
    t.fail(t.cut_off, asked)
    assert t.hub.state.reachability.pairs == {}
