"""Followers look by the client's rule: the simulator gives what looking step by step gives."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from bench.sim.assumptions import Assumption, Assumptions
from bench.sim.events import Events
from bench.sim.fleet import Fleet
from bench.sim.following import Follow, skip, waiting
from bench.sim.links import Link, Network
from bench.sim.progress import Progress
from bench.sim.reads import Read
from bench.sim.shapes import Shape, blob
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_core.client.looking import LEAST_PAUSE_S, MOST_PAUSE_S, Look

SEGMENT = 4 << 20
SEGMENTS = 500
TOTAL = float(SEGMENT * SEGMENTS)
RATE = 10e9
LATENCY_S = 1e-4
A = Assumptions()
CONTENT = b"a version"


@dataclass(eq=False)
class Chain:
    """Readers of which each follows the one before it; the first one reads from a copy that is whole."""

    events: Events = field(default_factory=Events)
    network: Network = field(default_factory=Network)
    shape: Shape = field(default_factory=lambda: Shape(blob(b"layout"), int(TOTAL), SEGMENT))
    progress: list[Progress] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    follows: list[Follow] = field(default_factory=list)
    ended_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events.after = self.network.settle

    def add(self, rate: float = RATE, at_s: float = 0.0) -> None:
        """Add a reader whose card takes bytes at some rate, and which begins at a time."""
        number = len(self.reads)
        progress = Progress(self.events, A, self.shape, lambda figures, answered: None, lambda: True)
        read = Read(self.events, self.network, TOTAL, partial(self._ended, number))
        part = read.add("source", (Link(f"into {number}", rate),), 0.0 if number else TOTAL)
        if number:
            before = self.progress[-1]
            word = partial(before.word, CONTENT)
            follow = Follow(self.events, read, "source", part, word, SEGMENT, LATENCY_S, lambda: None)
            before.followers.append(follow)
            self.follows.append(follow)
        self.progress.append(progress)
        self.reads.append(read)
        self.events.at(at_s, self._begin, number)

    def run(self, until_s: float = 1e6) -> list[float]:
        """Run; return when each ended."""
        self.events.run(lambda: len(self.ended_s) == len(self.reads), until_s)
        return [self.ended_s[number] for number in sorted(self.ended_s)]

    def _begin(self, number: int) -> None:
        self.reads[number].begin()
        self.progress[number].begin(self.reads[number], CONTENT)

    def _ended(self, number: int) -> None:
        self.ended_s[number] = self.events.now
        self.progress[number].end(whole=True)


def looked(verified_at_s: float, begun_s: float) -> float:
    """Return when the answer comes of the first look, of one after the other, that arrives after something was so."""
    look = Look(due_s=begun_s)
    while look.due_s + LATENCY_S < verified_at_s:
        look.answered(False, look.due_s + 2 * LATENCY_S)
    return look.due_s + 2 * LATENCY_S


@pytest.mark.parametrize("hops", [1, 2, 5, 40])
def test_each_hop_of_a_chain_adds_what_is_in_flight_and_the_wait_for_the_look_and_nothing_else(hops: int) -> None:
    chain = Chain()
    for _ in range(hops + 1):
        chain.add()
    flight, begun_s, seen = A.flight_bytes(RATE), 0.0, float("inf")
    expected = [TOTAL / RATE]
    for _ in range(hops):
        in_flight = flight if seen else 0.0
        heard_s = looked(begun_s + (SEGMENT + in_flight) / RATE, 0.0)
        verified = (heard_s - LATENCY_S - begun_s) * RATE - in_flight
        seen = verified // SEGMENT * SEGMENT
        late_s, _ = waiting(SEGMENT / RATE, LATENCY_S, heard_s)
        rests_s = late_s + LATENCY_S + SEGMENT / RATE / 2 - seen / RATE
        begun_s, seen = (heard_s + rests_s, 0.0) if rests_s > 0 else (heard_s, seen)
        expected.append(begun_s + TOTAL / RATE)
    assert chain.run() == pytest.approx(expected, abs=1e-7)
    assert expected[-1] - expected[0] > hops * (SEGMENT / RATE + 2 * LATENCY_S)


def test_a_follower_sees_all_once_its_source_has_read_all() -> None:
    """One that begins when its source has ended needs a single look."""
    chain, late_s = Chain(), 1.0
    chain.add()
    chain.add(at_s=late_s)
    assert chain.run() == pytest.approx([TOTAL / RATE, late_s + 2 * LATENCY_S + TOTAL / RATE], abs=1e-7)


def test_a_slow_source_is_followed_as_fast_as_it_comes_on() -> None:
    """A source at a tenth of the rate; the reference looks step by step, and reads at once what it sees."""
    chain, slow = Chain(), RATE / 10
    chain.add(rate=slow)
    chain.add()
    source_s, reader_s = chain.run()
    assert source_s == pytest.approx(TOTAL / slow)
    flight = A.flight_bytes(slow)
    look, done, free_s = Look(due_s=0.0), 0.0, 0.0
    while done < TOTAL:
        sample_s = look.due_s + LATENCY_S
        verified = TOTAL if sample_s >= source_s else max(0.0, sample_s * slow - flight) // SEGMENT * SEGMENT
        look.answered(verified > done, sample_s + LATENCY_S)
        if verified > done:
            free_s = sample_s + LATENCY_S + (verified - done) / RATE
            look.due_s, done = max(look.due_s, free_s), verified
    assert reader_s == pytest.approx(free_s, abs=MOST_PAUSE_S / 2)
    assert reader_s > source_s + LATENCY_S


@pytest.mark.parametrize("times", [2, 10, 60])
def test_a_chain_behind_a_slow_source_ends_as_if_each_look_had_been_carried_out(times: int) -> None:
    """What each of twelve readers shows is a stair, which the next one looks at; here it is a slope, a little late."""
    chain, slow, hops = Chain(), RATE / times, 12
    chain.add(rate=slow)
    for _ in range(hops):
        chain.add()
    ends_s, flight = chain.run(), A.flight_bytes(slow)
    first_s = TOTAL / slow

    def of_first(at_s: float) -> float:
        return TOTAL if at_s >= first_s else max(0.0, at_s * slow - flight) // SEGMENT * SEGMENT

    verified = of_first
    for _ in range(hops):
        look, done, steps = Look(due_s=0.0), 0.0, [(0.0, 0.0)]
        while done < TOTAL:
            read_s = look.due_s + LATENCY_S
            seen = verified(read_s)
            look.answered(seen > done, read_s + LATENCY_S)
            if seen > done:
                here_s = read_s + LATENCY_S + (seen - done) / RATE
                look.due_s, done = max(look.due_s, here_s), seen
                steps.append((here_s, seen))
        verified = partial(_step, steps)
    lag_s = steps[-1][0] - first_s
    assert 0.9 * lag_s < ends_s[-1] - ends_s[0] < 1.35 * lag_s


def _step(steps: list[tuple[float, float]], at_s: float) -> float:
    return steps[bisect_right(steps, (at_s, TOTAL)) - 1][1]


def test_nobody_needs_events_while_all_come_on_at_the_same_rate() -> None:
    short, long = Chain(), Chain()
    long.shape = Shape(long.shape.layout, 20 * int(TOTAL), SEGMENT)
    for _ in range(30):
        short.add()
        long.add()
    for read in long.reads:
        read.total = 20 * TOTAL
    next(iter(long.reads[0].parts.values())).limit = 20 * TOTAL
    short.run()
    long.run()
    assert long.events.count - short.events.count <= len(long.reads)


@pytest.mark.parametrize("cleared", [True, False])
def test_a_source_that_shows_another_version_or_nothing_is_not_followed(cleared: bool) -> None:
    chain = Chain()
    chain.add()
    chain.add()
    half_s = TOTAL / RATE / 2
    chain.events.at(half_s, chain.progress[0].clear)
    if not cleared:
        chain.events.at(half_s, chain.progress[0].begin, chain.reads[0], b"another version")
    assert chain.run(until_s=5.0) == pytest.approx([TOTAL / RATE])
    here = chain.reads[1].count()
    assert half_s * RATE - 2 * A.flight_bytes(RATE) < here <= half_s * RATE


def test_a_source_that_stands_still_is_looked_at_again_when_it_moves() -> None:
    chain = Chain()
    for _ in range(2):
        chain.add()
    part = chain.reads[0].parts["source"]
    part.limit = TOTAL / 2
    chain.events.at(1.0, chain.reads[0].advance, "source", TOTAL)
    first_s, second_s = chain.run()
    assert first_s == pytest.approx(1.0 + TOTAL / 2 / RATE)
    assert second_s > first_s
    assert second_s < first_s + MOST_PAUSE_S + 4 * LATENCY_S + (A.flight_bytes(RATE) + SEGMENT) / RATE


@given(
    st.floats(0.0, 1.0),
    st.sampled_from([LEAST_PAUSE_S * 2**n for n in range(4)]),
    st.floats(0.0, 0.02),
)
def test_looks_without_news_are_skipped_as_if_they_had_been_carried_out(
    until_s: float, pause_s: float, latency_s: float
) -> None:
    one, other = Look(pause_s, 0.0), Look(pause_s, 0.0)
    skip(one, until_s, latency_s)
    while other.due_s < until_s - 1e-9:
        other.answered(False, other.due_s + 2 * latency_s)
    assert one.due_s == pytest.approx(other.due_s, abs=1e-9)
    assert one.pause_s == other.pause_s


def test_news_that_come_seldom_are_seen_later_than_news_that_come_all_the_time() -> None:
    """With news all the time every look brings some, which are on average as old as half the time between looks."""
    (often_s, _), (seldom_s, _) = (waiting(news_s, LATENCY_S, 0.0) for news_s in (1e-5, 0.1))
    assert often_s >= LEAST_PAUSE_S / 2
    assert often_s < seldom_s <= MOST_PAUSE_S + 2 * LATENCY_S


# --- of whole fleets ------------------------------------------------------------------------------------------------


def fleet_of(readers: int, gpus_per_host: int = 1) -> tuple[Fleet, list[str]]:
    """Return a fleet whose readers hold the version before the one that is published."""
    a = replace(A, gpus_per_host=Assumption(gpus_per_host, "", "a test"))
    fleet = Fleet(a, int(TOTAL), 1)
    trainer = fleet.add("trainer")
    others = [fleet.add(f"reader-{number}") for number in range(readers)]
    fleet.connect([trainer, *others])
    fleet.renew(trainer, fleet.pass_versions(trainer, others) + 1)
    return fleet, [other.name for other in others]


def test_a_chain_comes_to_its_end_while_the_hub_is_away() -> None:
    fleet, names = fleet_of(8)
    for name in names:
        fleet.update_at(fleet.replicas[name], fleet.events.now)
    begun_s, one_s = fleet.events.now, TOTAL / A.link_bytes_per_s
    fleet.events.at(begun_s + one_s / 2, fleet.kill_hub)
    workers = [fleet.replicas[name].workers[0] for name in names]
    fleet.run(lambda: not fleet.hub.alive, "killing the hub")
    assert all(worker.progress.verified < SEGMENTS for worker in workers)
    fleet.run(lambda: all(worker.progress.verified == SEGMENTS for worker in workers), "reading")
    hop_s = A.flight_bytes(A.link_bytes_per_s) / A.link_bytes_per_s + MOST_PAUSE_S + 4 * A.latency_s.value
    assert fleet.events.now - begun_s < one_s + 8 * hop_s + 0.02
    assert not fleet.hub.alive
    fleet.settle()
    assert all(fleet.replicas[name].ended_s for name in names)


def test_readers_of_a_source_that_is_killed_go_on_elsewhere_with_what_they_have() -> None:
    fleet, names = fleet_of(4)
    for name in names:
        fleet.update_at(fleet.replicas[name], fleet.events.now)
    begun_s, one_s = fleet.events.now, TOTAL / A.link_bytes_per_s
    fleet.events.at(begun_s + one_s / 2, fleet.kill, fleet.replicas[names[1]])
    fleet.settle()
    left = [fleet.replicas[name] for name in names if name != names[1]]
    assert not any(replica.errors for replica in left)
    assert max(replica.stall_s for replica in left) < one_s + A.lost_peer_s.value + 0.15
    received = sum(replica.workers[0].into.carried_bytes for replica in left)
    assert received < 3 * TOTAL + 2 * (A.flight_bytes(A.link_bytes_per_s) + SEGMENT)


def test_a_version_that_replaces_another_costs_its_withdrawal_and_no_blobs() -> None:
    fleet, names = fleet_of(6)
    before = fleet.hub.messages.copy()
    fleet.update_all([fleet.replicas[name] for name in names], [fleet.events.now] * 6)
    messages = fleet.hub.messages - before
    asked = {name: messages[name] for name in ("JoinRound", "Unpublish", "Filling", "Done", "GetBlob", "PutBlob")}
    assert asked == {"JoinRound": 6, "Unpublish": 6, "Filling": 6, "Done": 6, "GetBlob": 0, "PutBlob": 0}
    assert sum(worker.into.carried_bytes for worker in fleet.workers()) == pytest.approx(6 * TOTAL)


def test_whoever_says_that_he_is_done_to_another_life_of_the_hub_sends_the_checksums_if_it_has_not_named_them() -> None:
    fleet, names = fleet_of(3)
    for name in names:
        fleet.update_at(fleet.replicas[name], fleet.events.now)
    fleet.events.at(fleet.events.now + TOTAL / A.link_bytes_per_s / 2, fleet.kill_hub)
    fleet.settle()
    versions = {fleet.replicas[name].workers[0].key for name in names}
    assert len(versions) == 1
    assert all(fleet.replicas[name].workers[0].published for name in names)
