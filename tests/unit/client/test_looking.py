"""Followers look at their source's progress: when, and what comes of what they see."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest

from tensorhub_core.client.executor import ReadExecutor
from tensorhub_core.client.looking import LEAST_PAUSE_S, MOST_PAUSE_S, PAUSE_SHARE, Look
from tensorhub_core.client.prefix_word import PrefixPage, tag_of
from tensorhub_core.client.reading import Destination, ReadEnd
from tensorhub_core.client.readjob import ReadJob
from tensorhub_core.config import ClientConfig
from tensorhub_core.layout.plan import plan_read
from tensorhub_core.transport.base import Batch
from tensorhub_core.transport.faults import Fault, FaultKind, FaultPlan
from tensorhub_core.transport.memory import MemoryNetwork
from tests.unit.client.executor_world import QUICK, World, end_of

pytestmark = pytest.mark.timeout(60)
DIGEST = bytes(range(16))
LATE_S = 0.05


class Following(World):
    """A source that is not whole and shows how far it is, and a destination that looks."""

    def __init__(self, plan: FaultPlan | None = None, network: MemoryNetwork | None = None, **config: str) -> None:
        super().__init__(plan, network)
        self.page, self.landing = PrefixPage(), PrefixPage()
        self.source.transport.register([self.page.region])
        self.destination.transport.register([self.landing.region])
        self.word = self.page.address
        self.segments = len(self.source.memory.table)
        if config:
            self.executor.close()
            self.executor = ReadExecutor(self.counting, ClientConfig(**config), flow=QUICK)  # type: ignore[arg-type]

    def show(self, segments: int, digest: bytes = DIGEST) -> None:
        self.page.show(tag_of(digest), segments)

    def follow(self, prefix: int = 0, **more: object) -> ReadJob:
        """Begin to read; the hub allows `prefix` segments."""
        access = self.source.access(prefix=prefix)
        shown = {"word": self.word, "tag": tag_of(DIGEST), **more}
        access = dataclasses.replace(access, **shown)  # type: ignore[arg-type]
        into = dataclasses.replace(self.destination.destination(), page=self.landing)
        return self.start_with(access, into)

    def start_with(self, access: object, into: Destination) -> ReadJob:
        plan = plan_read(self.destination.memory.layout, [access.layout])  # type: ignore[attr-defined]
        return self.executor.start(plan, [access], into, None, self.record)  # type: ignore[list-item]

    @property
    def looks(self) -> list[Batch]:
        return [each for each in self.counting.batches if int(each.remote[0]) == self.word]

    @property
    def prefix(self) -> int:
        return max((prefix for prefix, *_ in self.record.heard), default=0)


def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def test_it_looks_less_and_less_often_while_nothing_comes_and_soon_after_news() -> None:
    look, now, pauses = Look(), 10.0, []
    for _ in range(7):
        assert look.is_due(True, now)
        look.asked(now)
        look.answered(False, now)
        assert not look.is_due(True, now)
        pauses.append(look.due_s - now)
        now = look.due_s
    assert pauses == pytest.approx([0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 8e-3, 8e-3])
    assert max(pauses) == pytest.approx(MOST_PAUSE_S)
    look.asked(now)
    look.answered(True, now)
    assert look.due_s - now == pytest.approx(LEAST_PAUSE_S)


@pytest.mark.parametrize("every_s", [0.0005, 0.004, 0.0105, 0.03])
def test_of_news_at_even_times_it_hears_soon_and_by_few_looks(every_s: float) -> None:
    look, now, shown, late_s, looks = Look(), 0.0, 0, [], 0
    for number in range(1, 41):
        while shown < number:
            now = look.due_s if look.due_s > now else now + 5e-5
            look.asked(now)
            looks += 1
            is_there = int(now / every_s)
            if is_there > shown:
                late_s.append(now - (shown + 1) * every_s)
            look.answered(is_there > shown, now)
            shown = max(shown, is_there)
    assert sum(late_s[10:]) / len(late_s[10:]) <= max(LEAST_PAUSE_S, min(PAUSE_SHARE * every_s, MOST_PAUSE_S))
    assert looks <= 8 * 40
    for _ in range(20):
        now = look.due_s
        look.asked(now)
        look.answered(False, now)
    assert look.due_s - now == pytest.approx(MOST_PAUSE_S), "a source that has stopped is looked at seldom"


def test_a_look_behind_other_reads_is_old_when_it_comes_and_followed_by_another_one() -> None:
    look = Look()
    look.asked(1.0, behind=True)
    look.answered(False, 1.010)
    assert look.pause_s == LEAST_PAUSE_S
    assert not look.is_due(False, 1.010)
    assert look.is_due(True, 1.010)
    look.asked(1.010)
    look.answered(False, 1.011)
    assert not look.is_due(True, 1.011)
    look.posted = True  # one look goes with every batch
    assert look.is_due(False, 1.011)


def test_a_look_that_has_no_answer_for_long_says_so_but_not_for_a_pause_of_our_own() -> None:
    look = Look()
    assert not look.stalled(5.0, 1000.0)
    look.asked(10.0)
    assert not look.stalled(5.0, 14.9)
    assert "5.1 s" in look.stalled(5.0, 15.1)
    look.excused(15.1)
    assert not look.stalled(5.0, 20.0)
    assert look.stalled(5.0, 20.2)
    look.answered(False, 20.2)
    assert not look.stalled(5.0, 100.0)


def test_a_follower_goes_on_by_what_it_sees_and_nobody_else_tells_it(worlds: list[World]) -> None:
    worlds.append(world := Following())
    job = world.follow()
    assert job.wait(LATE_S) is None
    assert not world.prefix
    for segments in (1, 2, world.segments // 2, world.segments):
        world.show(segments)
        until(lambda: world.prefix == segments)  # noqa: B023
    assert end_of(job).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)
    assert end_of(job).done_bytes == world.source.memory.total_bytes, "looks are not counted"
    assert not end_of(job).fenced


def test_it_looks_before_all_that_it_may_read_is_asked_for(worlds: list[World]) -> None:
    """Answers that come in order would otherwise come when nothing is left to do, and the link would rest meanwhile."""
    worlds.append(world := Following(network=MemoryNetwork(4096)))
    half = world.segments // 2
    world.show(half)
    job = world.follow(prefix=half)
    until(lambda: len(world.looks) > 2)
    first = next(n for n, batch in enumerate(world.counting.batches) if int(batch.remote[0]) == world.word)
    before = sum(int(batch.length_bytes.sum()) for batch in world.counting.batches[:first])
    allowed = int(world.source.memory.table.length_bytes[:half].sum())
    assert allowed // 2 <= before < allowed
    world.show(world.segments)
    assert end_of(job).end is ReadEnd.VERIFIED


def test_nothing_is_read_beyond_what_is_shown(worlds: list[World]) -> None:
    worlds.append(world := Following())
    world.show(3)
    job = world.follow(prefix=1)
    until(lambda: world.prefix == 3)
    looks = len(world.looks)
    until(lambda: len(world.looks) > looks + 3)
    assert world.prefix == 3
    world.show(2)  # leave is never taken back
    until(lambda: len(world.looks) > looks + 8)
    job.cancel()
    assert end_of(job).end is ReadEnd.CANCELLED


def test_who_has_enough_to_read_does_not_look(worlds: list[World]) -> None:
    worlds.append(world := Following())
    assert end_of(world.follow(prefix=world.segments)).end is ReadEnd.VERIFIED
    assert not world.looks


@pytest.mark.parametrize("shown", [(5, bytes(16)), (10**6, DIGEST)])
def test_the_progress_of_another_version_counts_for_nothing(worlds: list[World], shown: tuple[int, bytes]) -> None:
    worlds.append(world := Following())
    world.show(*shown)
    job = world.follow(prefix=1)
    until(lambda: len(world.looks) > 5)
    assert world.prefix == 1
    world.show(world.segments)
    assert end_of(job).end is ReadEnd.VERIFIED


def test_what_the_hub_says_counts_as_well(worlds: list[World]) -> None:
    worlds.append(world := Following())
    job = world.follow()
    job.advance("lease", 2)
    until(lambda: world.prefix == 2)
    job.advance("lease", world.segments)
    assert end_of(job).end is ReadEnd.VERIFIED


def test_a_source_that_shows_more_than_it_has_is_corrupt_and_nothing_of_it_counts(worlds: list[World]) -> None:
    worlds.append(world := Following())
    access = world.source.access(prefix=1)
    for tensor in world.source.tensors.values():
        tensor.reshape(-1).view(np.uint8)[4096:] ^= 1
    world.show(world.segments)
    into = dataclasses.replace(world.destination.destination(), page=world.landing)
    job = world.start_with(dataclasses.replace(access, word=world.word, tag=tag_of(DIGEST)), into)
    outcome = end_of(job)
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "corrupt")
    assert outcome.verified[0]
    assert not outcome.verified.all()


@pytest.mark.parametrize("word", [8, 2**64 - 8])
def test_a_word_where_no_memory_is_fails_the_source(worlds: list[World], word: int) -> None:
    worlds.append(world := Following())
    world.word = word
    outcome = end_of(world.follow())
    assert outcome.end is ReadEnd.SOURCE_FAILED
    assert outcome.kind in ("lost", "unreachable")
    assert not world.looks


@pytest.mark.parametrize("more", [{"word": 0}, {"known": 1}], ids=["no word", "no manifest"])
def test_only_the_hub_is_heard_where_there_is_no_word_or_no_manifest(worlds: list[World], more: dict[str, int]) -> None:
    worlds.append(world := Following())
    world.show(world.segments)
    job = world.follow(prefix=1, **more)
    assert job.wait(LATE_S) is None
    assert not world.looks
    assert world.prefix == 1
    job.cancel()
    assert end_of(job).end is ReadEnd.CANCELLED


@pytest.mark.parametrize("verify", ["sampled", "off"])
def test_who_does_not_compare_everything_believes_no_word(worlds: list[World], verify: str) -> None:
    worlds.append(world := Following(verify=verify))
    world.show(world.segments)
    job = world.follow(prefix=1)
    assert job.wait(LATE_S) is None
    assert not world.looks
    job.advance("lease", world.segments)
    assert end_of(job).end is ReadEnd.VERIFIED


@pytest.mark.parametrize(
    ("fault", "kinds", "fenced"),
    [
        (FaultKind.FAIL, ("lost", "unreachable"), True),
        (FaultKind.STALL, ("stalled", "unreachable"), True),
        (FaultKind.LATE, ("stalled", "unreachable"), True),
    ],
)
@pytest.mark.parametrize("number", [0, 3], ids=["the first look", "a later one"])
def test_a_look_that_goes_wrong_fails_the_source_and_nothing_lands_afterwards(
    worlds: list[World], fault: FaultKind, kinds: tuple[str, ...], fenced: bool, number: int
) -> None:
    worlds.append(world := Following(FaultPlan({number: Fault(fault)})))
    outcome = end_of(world.follow())
    assert (outcome.end, outcome.fenced) == (ReadEnd.SOURCE_FAILED, fenced)
    assert outcome.kind == (kinds[0] if number else kinds[1])
    assert world.counting.fences == 1
    before = world.landing.landed(0)
    world.show(world.segments)
    world.faulty.land_late()
    world.network.network.step()
    assert world.landing.landed(0) == before


def test_a_look_that_lies_brings_nothing_new(worlds: list[World]) -> None:
    worlds.append(world := Following(FaultPlan({0: Fault(FaultKind.LIE), 1: Fault(FaultKind.LIE)})))
    world.show(world.segments)
    assert end_of(world.follow()).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)


def test_a_bit_of_a_look_that_arrives_wrong_counts_for_nothing(worlds: list[World]) -> None:
    worlds.append(world := Following(FaultPlan({number: Fault(FaultKind.FLIP) for number in range(6)})))
    world.show(world.segments)
    assert end_of(world.follow()).end is ReadEnd.VERIFIED
    assert world.destination.holds(world.truth)
    assert len(world.looks) >= 7


@pytest.mark.parametrize("step_bytes", [1, None])
def test_a_job_that_is_cancelled_leaves_no_look_behind(worlds: list[World], step_bytes: int | None) -> None:
    worlds.append(world := Following(network=MemoryNetwork(step_bytes)))
    job = world.follow()
    until(lambda: len(world.looks) > 2)
    job.cancel()
    assert end_of(job).end is ReadEnd.CANCELLED
    assert not world.counting.in_flight
    world.show(1)
    for _ in range(10):
        world.network.network.step()
    assert world.landing.landed(0) == 0


def test_a_source_that_is_killed_while_it_is_looked_at_is_lost(worlds: list[World]) -> None:
    worlds.append(world := Following())
    job = world.follow(prefix=1)
    until(lambda: world.prefix == 1 and len(world.looks) > 2)
    world.network.network.kill(world.source.description)
    outcome = end_of(job)
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "lost")
    assert outcome.verified.sum() == 1


def test_a_source_that_stops_while_it_is_looked_at_has_stalled(worlds: list[World]) -> None:
    worlds.append(world := Following())
    job = world.follow(prefix=1)
    until(lambda: world.prefix == 1 and len(world.looks) > 2)
    world.network.network.stop(world.source.description)
    began = time.monotonic()
    outcome = end_of(job)
    assert (outcome.end, outcome.kind) == (ReadEnd.SOURCE_FAILED, "stalled")
    assert 0.5 * QUICK.stall_timeout_s < time.monotonic() - began


@pytest.mark.parametrize("step_bytes", [None, 2], ids=["answered at once", "answered later"])
def test_it_rests_between_two_looks_but_not_for_long(worlds: list[World], step_bytes: int | None) -> None:
    worlds.append(world := Following(network=MemoryNetwork(step_bytes)))
    before_s = time.process_time()
    job = world.follow()
    assert job.wait(0.5) is None
    assert 0.5 / MOST_PAUSE_S * 0.2 < len(world.looks) < 0.5 / MOST_PAUSE_S + 10
    assert time.process_time() - before_s < 0.4
    job.cancel()
    end_of(job)
