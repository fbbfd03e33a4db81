"""A worker shows how far its unfinished copy is, and never more than is verified of what it fills now."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core.client.prefix_word import PrefixPage, segments_in
from tensorhub_core.client.worker import Worker
from tensorhub_core.errors import VersionUnavailable
from tests.unit.client.fake_executor import FakeExecutor, Job, SourceBroken
from tests.unit.client.hubs import Hub, hub, next_version, publisher, reader

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here() -> Iterator[Hub]:
    with hub() as made:
        yield made


class Watching(FakeExecutor):
    """An executor that notes what the page says before each read."""

    def __init__(self, breaks_at: int | None = None) -> None:
        super().__init__(self._note)
        self.page: PrefixPage | None = None
        self.breaks_at = breaks_at
        self.seen: list[int] = []

    def _note(self, job: Job, index: int) -> None:
        self.page = job.destination.page
        self.seen.append(shown(self.page, job))
        if index == self.breaks_at:
            raise SourceBroken("lost")


def raw_word(page: PrefixPage | None) -> int:
    assert page is not None
    return ctypes.c_uint64.from_address(page.address).value


def shown(page: PrefixPage | None, job: Job) -> int:
    """Return how many segments a follower of the same manifest sees; the word must say that or nothing."""
    count = segments_in(raw_word(page), job.sources[0].tag, len(job.sources[0].sums))
    assert count or not raw_word(page)
    return count


def page_of(worker: Worker) -> PrefixPage:
    memory = worker._resources.memory
    assert memory is not None
    return memory.page


def watched(here: Hub, **more: Any) -> tuple[Worker, Any, Watching]:
    executor = Watching()
    return *reader(here, executor=executor, **more), executor


def test_what_is_verified_is_shown_as_it_comes_and_when_all_is_there(here: Hub) -> None:
    trainer = publisher(here)
    rollout, _, executor = watched(here)
    assert rollout.replicate() == 1
    count = len(executor.seen)
    assert count > 5
    assert executor.seen == list(range(count))
    assert executor.page is page_of(rollout)
    job = executor.jobs[0]
    assert shown(page_of(rollout), job) == count
    assert job.sources[0].word == page_of(trainer).address, "where to look at a source is known"


def test_the_next_round_shows_nothing_before_it_has_verified_something(here: Hub) -> None:
    trainer = publisher(here)
    rollout, _, executor = watched(here)
    rollout.replicate()
    next_version(trainer, 2, 3)
    executor.seen.clear()
    assert rollout.update() == 2
    assert executor.seen == list(range(len(executor.seen)))
    assert shown(page_of(rollout), executor.jobs[1]) == len(executor.seen)


@pytest.mark.parametrize("verify", ["always", "sampled", "off"])
@pytest.mark.parametrize("publish", [True, False])
def test_nothing_is_shown_of_what_nobody_may_follow(here: Hub, verify: str, publish: bool) -> None:
    publisher(here)
    rollout, _, executor = watched(here, verify=verify)
    assert rollout.replicate(publish=publish) == 1
    if verify == "always" and publish:
        assert any(executor.seen)
    else:
        assert not any(executor.seen)
        assert raw_word(page_of(rollout)) == 0


def test_nothing_is_shown_of_what_is_derived_from_another_layout(here: Hub) -> None:
    publisher(here)
    rollout, _, executor = watched(here, segment_bytes=16384)
    assert rollout.replicate() == 1
    assert executor.seen
    assert not any(executor.seen)
    assert raw_word(page_of(rollout)) == 0


def test_a_round_that_breaks_takes_its_word_back(here: Hub) -> None:
    publisher(here)
    rollout, _, executor = watched(here)
    executor.breaks_at = 3
    with pytest.raises(VersionUnavailable):
        rollout.replicate()
    assert max(executor.seen) == 3
    assert raw_word(page_of(rollout)) == 0


def test_a_read_that_goes_on_elsewhere_shows_what_it_has_all_the_time(here: Hub) -> None:
    publisher(here)
    publisher(here, replica="other")
    rollout, _, executor = watched(here)
    executor.breaks_at = 3
    seen_between: list[int] = []
    note = executor.before

    def once(job: Job, index: int) -> None:
        if len(executor.jobs) > 1:
            executor.breaks_at = None
            seen_between.append(index)
        note(job, index)

    executor.before = once
    assert rollout.replicate() == 1
    assert seen_between[0] == 3
    assert shown(page_of(rollout), executor.jobs[0]) == len(executor.jobs[0].verified)


def test_a_copy_that_is_withdrawn_shows_nothing(here: Hub) -> None:
    publisher(here)
    rollout, _, _ = watched(here)
    rollout.replicate()
    assert raw_word(page_of(rollout))
    rollout.unpublish()
    assert raw_word(page_of(rollout)) == 0


def test_what_is_staged_is_shown_in_a_page_of_its_own(here: Hub) -> None:
    publisher(here)
    rollout, _, executor = watched(here)
    with rollout.stage() as staged:
        assert executor.seen == list(range(len(executor.seen)))
        assert executor.page is not page_of(rollout)
        assert shown(executor.page, executor.jobs[0]) == len(executor.seen)
        assert raw_word(page_of(rollout)) == 0
        assert staged.install() == 1
        assert raw_word(page_of(rollout)) == 0, "it is offered when it is complete"
