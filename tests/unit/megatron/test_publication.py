"""Ranks of one trainer stay together: what fails on one is raised on all, and none steps while another has readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tensorhub_core.errors import (
    ConfigError,
    DeadlineExceeded,
    RegistrationError,
    ServerUnreachable,
    StateError,
    TensorHubError,
    error_from_wire,
)
from tensorhub_megatron.publication import Publication, Registration
from tensorhub_megatron.publisher import Publisher

RANKS = 3
PATIENCE_S = 20.0


class Meeting:
    """An agreement of threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=PATIENCE_S)
        self.outcomes: list[Any] = [None] * ranks

    def exchange(self, rank: int, outcome: Any) -> list[Any]:
        self.outcomes[rank] = outcome
        self.barrier.wait()
        found = list(self.outcomes)
        self.barrier.wait()
        return found


@dataclass
class ThreadsAgree:
    meeting: Meeting
    rank: int
    size: int = RANKS
    closed: bool = False

    def settle(self, what: str, error: Exception | None, value: int, step: int = 0) -> None:
        found = self.meeting.exchange(self.rank, (error, (value, step)))
        if error is not None:
            raise error
        for other, _ in found:
            if other is not None:
                raise error_from_wire(getattr(other, "code", "error"), f"{what}: {other}")
        if len({both for _, both in found}) > 1:
            raise StateError(f"{what}: they differ")

    def highest(self, value: int) -> int:
        return max(self.meeting.exchange(self.rank, value))

    def close(self) -> None:
        self.closed = True


@dataclass
class Rank:
    """One rank: its worker, its weights and its optimizer are all this object."""

    agreement: ThreadsAgree
    events: list[str] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)
    skips: bool = False
    has_moved: bool = False
    steps: int = 0

    def _note(self, event: str) -> None:
        error = self.fails.pop(event.split()[0], None)
        if error is not None:
            raise error
        self.events.append(event)

    def register(self, tensors: Any, boxes: Any = None) -> None:
        self._note("register")
        self.has_moved = False

    def publish(self, version: int) -> None:
        self._note(f"publish {version}")

    def unpublish(self, timeout_s: float | None = None) -> None:
        self._note("unpublish")

    def close(self) -> None:
        self.events.append("close")

    def refresh(self) -> None:
        self._note("refresh")

    def describe(self) -> Registration:
        return Registration({"w": object()})

    def moved(self) -> bool:
        return self.has_moved

    def step(self) -> tuple[bool, float]:
        self.events.append("skip" if self.skips else "step")
        self.steps += not self.skips
        return not self.skips, 1.0


@pytest.fixture
def ranks() -> list[Rank]:
    meeting = Meeting(RANKS)
    return [Rank(ThreadsAgree(meeting, number)) for number in range(RANKS)]


def on_all(act: Callable[[int], Any]) -> list[Any]:
    """Call `act(rank)` on all ranks at once; return what each returned or raised."""

    def safely(rank: int) -> Any:
        try:
            return act(rank)
        except TensorHubError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(safely, range(RANKS)))


def attach_all(ranks: list[Rank], **how: Any) -> list[Publisher]:
    def attach(number: int) -> Publisher:
        rank = ranks[number]
        publication = Publication(rank, agreement=rank.agreement, **how)
        publication.open(lambda: rank)
        return Publisher(publication, rank)

    return on_all(attach)


def test_a_wait_that_fails_on_one_rank_lets_none_step_and_can_be_taken_up_again(ranks: list[Rank]) -> None:
    publishers = attach_all(ranks)
    ranks[1].fails["unpublish"] = DeadlineExceeded("2 readers")
    errors = on_all(lambda number: ranks[number].step())
    assert [type(error) for error in errors] == [DeadlineExceeded] * RANKS
    assert all("2 readers" in str(error) for error in errors)
    assert [rank.steps for rank in ranks] == [0] * RANKS

    assert on_all(lambda number: ranks[number].step()) == [(True, 1.0)] * RANKS
    assert [publisher.version for publisher in publishers] == [1] * RANKS
    # Nobody takes back what it has taken back before.
    assert all(rank.events.count("unpublish") == 1 for rank in ranks)
    assert [rank.steps for rank in ranks] == [1] * RANKS


def test_a_publish_that_fails_on_one_rank_is_raised_on_all_and_its_number_is_not_used_again(ranks: list[Rank]) -> None:
    publishers = attach_all(ranks)
    ranks[2].fails["publish"] = ServerUnreachable("no answer")
    errors = on_all(lambda number: ranks[number].step())
    assert [type(error) for error in errors] == [ServerUnreachable] * RANKS
    assert [publisher.version for publisher in publishers] == [0] * RANKS

    assert on_all(lambda number: ranks[number].step()) == [(True, 1.0)] * RANKS
    assert [publisher.version for publisher in publishers] == [2] * RANKS
    # Other weights under the number of the failed try would be a conflict for those who have published it.
    assert ranks[0].events[-5:] == ["publish 1", "unpublish", "step", "refresh", "publish 2"]
    assert ranks[2].events[-4:] == ["refresh", "step", "refresh", "publish 2"]


def test_a_skipped_step_after_a_failed_publish_tries_the_same_number_again(ranks: list[Rank]) -> None:
    publishers = attach_all(ranks)
    ranks[0].fails["publish"] = ServerUnreachable("no answer")
    on_all(lambda number: ranks[number].step())
    for rank in ranks:
        rank.skips = True
    assert on_all(lambda number: ranks[number].step()) == [(False, 1.0)] * RANKS
    assert [publisher.version for publisher in publishers] == [1] * RANKS
    assert {rank.events[-1] for rank in ranks} == {"publish 1"}


def test_a_step_that_succeeds_on_some_ranks_only_is_refused_before_anything_is_gathered(ranks: list[Rank]) -> None:
    attach_all(ranks)
    ranks[0].skips = True
    errors = on_all(lambda number: ranks[number].step())
    assert [type(error) for error in errors] == [StateError] * RANKS
    assert {rank.events[-1] for rank in ranks} == {"skip", "step"}


@pytest.mark.parametrize("what", ["register", "publish"])
def test_an_attach_that_fails_on_one_rank_leaves_nothing_on_any(ranks: list[Rank], what: str) -> None:
    ranks[1].fails[what] = ServerUnreachable("no answer")
    errors = attach_all(ranks)
    assert [type(error) for error in errors] == [ServerUnreachable] * RANKS
    assert {rank.events[-1] for rank in ranks} == {"close"}
    assert all(rank.agreement.closed for rank in ranks)
    assert all("step" not in vars(rank) for rank in ranks)


def test_memory_that_moved_is_registered_anew_on_the_rank_where_it_did(ranks: list[Rank]) -> None:
    attach_all(ranks)
    ranks[1].has_moved = True
    on_all(lambda number: ranks[number].step())
    # One that only the worker notices.
    ranks[2].fails["publish"] = RegistrationError("w was moved")
    on_all(lambda number: ranks[number].step())
    assert [rank.events.count("register") for rank in ranks] == [1, 2, 2]
    assert {rank.events[-1] for rank in ranks} == {"publish 2"}


def test_with_every_2_no_rank_publishes_at_odd_steps(ranks: list[Rank]) -> None:
    publishers = attach_all(ranks, every=2)
    for _ in range(5):
        assert on_all(lambda number: ranks[number].step()) == [(True, 1.0)] * RANKS
    assert [publisher.version for publisher in publishers] == [2] * RANKS
    steps = ["unpublish", "step", "step", "refresh", "publish 1", "unpublish", "step", "step", "refresh", "publish 2"]
    assert ranks[0].events == ["refresh", "register", "publish 0", *steps, "unpublish", "step"]


@pytest.mark.parametrize(("start_version", "every"), [(-1, 1), (0, 0), (0, -2)])
def test_impossible_numbers_are_refused_before_anybody_is_met(
    ranks: list[Rank], start_version: int, every: int
) -> None:
    with pytest.raises(ConfigError):
        Publication(ranks[0], start_version=start_version, every=every, agreement=ranks[0].agreement)
    assert ranks[0].events == []
