"""The swap transaction against a fake engine in which any step may fail: what is served is never a mix."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tensorhub_core.engine.steps import (
    Discard,
    EngineStatus,
    Install,
    Look,
    Pause,
    Process,
    Publish,
    ResetCaches,
    Resume,
    SetVersion,
    ShardReport,
    Stage,
    Step,
    SwapOutcome,
    Update,
    drive,
    http_status,
)
from tensorhub_core.engine.swap import Swapper
from tensorhub_core.errors import StateError, VersionUnavailable


@dataclass
class Rank:
    """`memory`, `served`: versions, None = dirty or not processed since."""

    memory: int | None = 1
    served: int | None = 1
    published: bool = True
    staged: int | None = None


@dataclass
class Fake:
    """An engine of several ranks. `failures` maps the count of a step to what goes wrong in it."""

    ranks: list[Rank]
    hub: int = 2
    offers: bool = True
    staged: bool = False
    failures: dict[int, str] = field(default_factory=dict)
    paused: bool = False
    caches: int | None = 1
    label: int = 1
    steps: list[Step] = field(default_factory=list)
    clock: Iterator[float] = field(default_factory=lambda: itertools.count(0.0, 1.0))
    served_log: list[tuple[int | None, ...]] = field(default_factory=list)

    def swapper(self) -> Swapper:
        swapper = Swapper(EngineStatus("policy", "engine"), lambda: next(self.clock), self.staged)
        swapper.started(self.reports())
        return swapper

    def reports(self, failed: int | None = None, code: str = "error") -> list[ShardReport]:
        return [
            ShardReport(
                shard,
                ok=shard != failed,
                version=rank.memory,
                served=rank.served,
                published=rank.published,
                digest=f"digest-{rank.memory}" if rank.memory is not None else "",
                code=code if shard == failed else "",
                message="it broke" if shard == failed else "",
                staged=None if rank.staged is None else (0, rank.staged),
            )
            for shard, rank in enumerate(self.ranks)
        ]

    def perform(self, step: Step) -> Any:
        failure = self.failures.pop(len(self.steps), "")
        self.steps.append(step)
        if failure == "raise before":
            raise VersionUnavailable("gone")
        answer = self._do(step, failure)
        if failure == "raise after":
            raise StateError("reply lost")
        return answer

    def _do(self, step: Step, failure: str) -> Any:
        match step:
            case Look():
                return (0, self.hub)
            case Pause():
                self.paused = True
            case Stage(version=version):
                return self._stage(self.hub if version == "latest" else version, failure)
            case Install():
                assert self.paused, "the memory of a running engine must not change"
                (staged,) = {rank.staged for rank in self.ranks}
                assert staged is not None, "no byte is overwritten before all ranks have staged"
                return self._update(staged, failure)
            case Discard():
                for rank in self.ranks:
                    rank.staged = None
            case Update(version=version):
                assert self.paused, "the memory of a running engine must not change"
                return self._update(self.hub if version == "latest" else version, failure)
            case Process():
                assert self.paused
                return self._process(failure)
            case ResetCaches():
                if failure == "refuse":
                    return False
                self.caches = None
                return True
            case Publish():
                for rank in self.ranks:
                    rank.published = failure != "refuse"
                return self.reports(0 if failure == "refuse" else None)
            case SetVersion(version=version):
                self.label = version
            case Resume():
                self.paused = False
                self._check_serving()
        return None

    def _update(self, version: int, failure: str) -> list[ShardReport]:
        if failure == "refuse":
            return self.reports(1 % len(self.ranks), "layout_mismatch")
        if failure == "dirty":
            for rank in self.ranks:
                rank.memory, rank.served, rank.published = None, None, False
            return self.reports(0, "corrupt_transfer")
        for rank in self.ranks:
            if rank.memory != version:
                rank.memory, rank.served, rank.published = version, None, self.offers
        return self.reports()

    def _stage(self, version: int, failure: str) -> list[ShardReport]:
        assert not self.paused, "what is staged while the engine stands still is no gain"
        for rank in self.ranks:
            rank.staged = version
        if failure in ("refuse", "dirty"):
            self.ranks[-1].staged = None if failure == "refuse" else version + 100
        return self.reports(len(self.ranks) - 1 if failure == "refuse" else None, "version_unavailable")

    def _process(self, failure: str) -> list[ShardReport]:
        for shard, rank in enumerate(self.ranks):
            assert rank.memory is not None, "dirty memory must never be processed"
            rank.served = rank.memory if failure != "refuse" or shard == 0 else None
        return self.reports(len(self.ranks) - 1 if failure == "refuse" else None)

    def _check_serving(self) -> None:
        served = {rank.served for rank in self.ranks}
        assert len(served) == 1, "ranks that compute with different versions were resumed"
        assert None not in served, "an engine that was not processed was resumed"
        assert all(rank.memory == rank.served for rank in self.ranks)
        (version,) = served
        assert self.caches in (None, version), "cached blocks of other weights would be served"
        assert self.label == version, "answers would carry a wrong version"
        self.caches = version
        self.served_log.append(tuple(rank.served for rank in self.ranks))


def run(fake: Fake, swapper: Swapper, version: Any = "latest") -> SwapOutcome:
    return drive(swapper.swap(version, "wait"), fake.perform)


def test_a_swap_pauses_updates_processes_resets_labels_and_resumes_in_this_order() -> None:
    fake = Fake([Rank(), Rank()])
    swapper = fake.swapper()
    assert run(fake, swapper) == SwapOutcome(2, True)
    kinds = [type(step) for step in fake.steps]
    assert kinds == [Look, Pause, Update, Process, ResetCaches, SetVersion, Resume]
    status = swapper.status
    assert (status.state, status.version, status.error) == ("serving", 2, None)
    assert status.last_swap is not None
    assert status.last_swap.total_s >= status.last_swap.transfer_s > 0


def test_what_is_processed_in_place_is_published_only_after_processing() -> None:
    fake = Fake([Rank(), Rank()], offers=False)
    assert run(fake, fake.swapper()).ok
    kinds = [type(step) for step in fake.steps]
    assert kinds.index(Process) < kinds.index(Publish) < kinds.index(Resume)
    assert all(rank.published for rank in fake.ranks)


def test_nothing_is_stopped_for_a_version_that_is_already_served_or_not_there() -> None:
    fake = Fake([Rank()], hub=1)
    swapper = fake.swapper()
    assert run(fake, swapper) == SwapOutcome(1, False)
    fake.failures = {1: "raise before"}
    outcome = run(fake, swapper, 7)
    assert (outcome.code, outcome.version) == ("version_unavailable", 1)
    assert [type(step) for step in fake.steps] == [Look, Look]
    assert swapper.status.state == "serving"


def test_a_refused_update_returns_to_the_old_version() -> None:
    fake = Fake([Rank(), Rank()], failures={2: "refuse"})
    swapper = fake.swapper()
    outcome = run(fake, swapper)
    assert (outcome.version, outcome.code) == (1, "layout_mismatch")
    assert swapper.status.state == "serving"
    assert swapper.status.error is not None
    assert not fake.paused
    assert run(fake, swapper).ok
    assert swapper.status.error is None


def test_a_broken_update_stays_paused_until_a_source_appears() -> None:
    fake = Fake([Rank(), Rank()], failures={2: "dirty"})
    swapper = fake.swapper()
    outcome = run(fake, swapper)
    assert (outcome.version, outcome.code, outcome.ok) == (None, "corrupt_transfer", False)
    assert (swapper.status.state, swapper.status.version, fake.paused) == ("paused", None, True)
    assert run(fake, swapper) == SwapOutcome(2, True)
    assert swapper.status.state == "serving"


def test_a_staged_swap_stops_the_engine_only_when_all_ranks_have_the_bytes() -> None:
    fake = Fake([Rank(), Rank()], staged=True)
    swapper = fake.swapper()
    assert run(fake, swapper) == SwapOutcome(2, True)
    kinds = [type(step) for step in fake.steps]
    assert kinds == [Look, Stage, Pause, Install, Process, ResetCaches, SetVersion, Resume]
    times = swapper.status.last_swap
    assert times is not None
    assert times.stage_s is not None
    assert swapper.status.as_json()["last_swap"]["stage_s"] == times.stage_s > 0


@pytest.mark.parametrize(
    ("failure", "code"),
    [("refuse", "version_unavailable"), ("raise before", "version_unavailable"), ("dirty", "state_error")],
)
def test_a_version_that_cannot_be_staged_by_all_ranks_stops_nothing(failure: str, code: str) -> None:
    fake = Fake([Rank(), Rank()], staged=True, failures={1: failure})
    swapper = fake.swapper()
    outcome = run(fake, swapper)
    assert (outcome.version, outcome.code) == (1, code)
    assert [type(step) for step in fake.steps] == [Look, Stage, Discard]
    assert (swapper.status.state, swapper.status.version) == ("serving", 1)
    assert swapper.status.error
    assert all(rank.staged is None for rank in fake.ranks)
    assert run(fake, swapper) == SwapOutcome(2, True)
    assert swapper.status.error is None


def test_a_second_swap_while_one_is_staged_is_a_state_error() -> None:
    fake = Fake([Rank()], staged=True)
    swapper = fake.swapper()
    running = swapper.swap("latest", "wait")
    next(running)
    assert running.send((0, 2)) == Stage("latest")
    assert swapper.status.state == "serving", "the old version serves meanwhile"
    with pytest.raises(StateError, match="a swap is running"):
        next(swapper.swap("latest", "wait"))


def test_an_engine_that_stands_still_is_filled_at_once() -> None:
    fake = Fake([Rank(), Rank()], staged=True, failures={3: "dirty"})
    swapper = fake.swapper()
    assert not run(fake, swapper).ok
    assert fake.steps[-1] == Discard()
    fake.steps.clear()
    assert run(fake, swapper) == SwapOutcome(2, True)
    assert [type(step) for step in fake.steps][:2] == [Look, Update]


@pytest.mark.parametrize("kind", ["raise before", "raise after", "refuse", "dirty"])
@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("offers", [True, False])
@pytest.mark.parametrize("staged", [True, False])
def test_no_single_failure_leads_to_a_mix_and_the_next_swap_heals_it(
    kind: str, at: int, offers: bool, staged: bool
) -> None:
    fake = Fake([Rank(), Rank()], offers=offers, staged=staged, failures={at: kind})
    swapper = fake.swapper()
    outcome = run(fake, swapper)
    if outcome.ok:
        assert all(rank.served == outcome.version for rank in fake.ranks)
    if swapper.status.state == "serving":
        assert not fake.paused
    fake.failures = {}
    healed = run(fake, swapper)
    assert (healed.version, healed.code) == (2, "")
    assert swapper.status.state == "serving"
    assert not fake.paused


@pytest.mark.parametrize("seed", range(300))
def test_no_history_of_failures_leads_to_a_mix(seed: int) -> None:
    chance = random.Random(seed)
    ranks = [Rank() for _ in range(chance.choice((1, 2, 4)))]
    fake = Fake(ranks, offers=chance.random() < 0.5, staged=chance.random() < 0.5)
    swapper = fake.swapper()
    for _ in range(8):
        fake.hub += chance.choice((0, 1, 2))
        if chance.random() < 0.7:
            at = len(fake.steps) + chance.randrange(8)
            fake.failures = {at: chance.choice(("raise before", "raise after", "refuse", "dirty"))}
        outcome = run(fake, swapper)
        status = swapper.status
        assert status.state != "swapping"
        if outcome.ok:
            assert {rank.served for rank in fake.ranks} == {outcome.version} == {fake.label}
        if status.state == "serving":
            assert not fake.paused
            assert status.version == fake.ranks[0].served
        else:
            assert status.version is None
            assert status.error
    fake.failures = {}
    assert run(fake, swapper).version == fake.hub


def test_a_restarted_stream_with_the_same_number_is_processed_again() -> None:
    fake = Fake([Rank(memory=5, served=5)], hub=5, caches=5, label=5)
    swapper = fake.swapper()

    def perform(step: Step) -> Any:
        if isinstance(step, Look):
            return (1, 5)
        if isinstance(step, Update):
            fake.ranks[0].served = None
        answer = fake.perform(step)
        if isinstance(answer, list):
            answer = [ShardReport(0, version=5, epoch=1, served=r.served, published=True, digest="d") for r in answer]
        return answer

    assert drive(swapper.swap("latest", "wait"), perform).changed
    assert Process() in fake.steps
    assert (swapper.status.epoch, swapper.status.version) == (1, 5)


def test_success_without_a_digest_is_no_success() -> None:
    fake = Fake([Rank()])
    swapper = fake.swapper()

    def perform(step: Step) -> Any:
        answer = fake.perform(step)
        return [ShardReport(0, version=2, published=True)] if isinstance(step, Update) else answer

    outcome = drive(swapper.swap("latest", "wait"), perform)
    assert outcome.code == "state_error"
    assert fake.paused


def test_ranks_that_disagree_at_the_start_are_refused() -> None:
    swapper = Swapper(EngineStatus("policy", "engine"), lambda: 0.0)
    with pytest.raises(StateError, match="did not start with one version"):
        swapper.started([ShardReport(0, version=1, served=1), ShardReport(1, version=2, served=2)])


def test_a_second_swap_while_one_runs_is_a_state_error() -> None:
    fake = Fake([Rank()])
    swapper = fake.swapper()
    running = swapper.swap("latest", "wait")
    next(running)
    running.send((0, 2))
    with pytest.raises(StateError, match="a swap is running"):
        next(swapper.swap("latest", "wait"))


def test_the_public_form_has_the_documented_keys() -> None:
    fake = Fake([Rank(), Rank()])
    swapper = fake.swapper()
    run(fake, swapper)
    body = swapper.status.as_json()
    assert set(body) == {"version", "epoch", "model", "replica", "state", "error", "shards", "last_swap"}
    assert set(body["shards"][0]) == {"shard", "version", "source", "digest", "total_bytes"}
    assert set(body["last_swap"]) == {"mode", "drain_s", "transfer_s", "process_s", "total_s"}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 200),
        ("version_unavailable", 404),
        ("layout_mismatch", 409),
        ("version_conflict", 409),
        ("state_error", 409),
        ("corrupt_transfer", 502),
        ("deadline_exceeded", 504),
        ("something else", 500),
    ],
)
def test_outcomes_map_to_http(code: str, status: int) -> None:
    assert http_status(code) == status
