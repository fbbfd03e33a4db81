"""Engines of two ranks: one version for both, always, and replies that stay in step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tensorhub_core import Server, serve
from tensorhub_vllm.offline import OfflineEngine

from ..mirror import mirroring
from ..models import Checkpoints, Trainer, training
from .engines import Answers, answers, following, fresh, running

pytestmark = pytest.mark.timeout(400)
KIND = "dense-tied"
TWO: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def bound() -> Iterator[None]:
    """Give each rank a core of its own, or they crawl."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints, bound: None) -> Answers:
    """What an engine of two ranks answers that loaded the second checkpoint from disk."""
    return fresh(checkpoints(KIND, 2), **TWO)


Setup = tuple[Server, Trainer, Any, OfflineEngine]


@pytest.fixture(scope="module")
def setup(checkpoints: Checkpoints, bound: None, expected: Answers) -> Iterator[Setup]:
    """A hub, a trainer with version 1, and an engine of two ranks that was filled from it."""
    with (
        serve("tcp://127.0.0.1:0", lease_s=2.0, heartbeat_s=0.5) as hub,
        training(hub.address, checkpoints(KIND, 1)) as trainer,
        following(checkpoints.bare(KIND), hub.address, timeout_s=30, engine=TWO) as (llm, engine),
    ):
        yield hub, trainer, llm, engine


def test_both_ranks_swap_to_one_version(setup: Setup, checkpoints: Checkpoints, expected: Answers) -> None:
    _, trainer, llm, engine = setup
    assert [report.version for report in engine.status.shards] == [1, 1]
    before = answers(llm)
    trainer.publish(checkpoints(KIND, 2), 2)
    assert engine.swap().version == 2
    assert answers(llm) == expected != before
    assert [report.shard for report in engine.status.shards] == [0, 1]
    assert len({report.digest for report in engine.status.shards}) == 2, "the ranks hold different bytes"
    assert all(report.source == "trainer" for report in engine.status.shards)


def test_an_engine_of_one_rank_fills_from_one_of_two(setup: Setup, checkpoints: Checkpoints, expected: Answers) -> None:
    hub, trainer, _, engine = setup
    trainer.worker.unpublish()
    with following(checkpoints.bare(KIND), hub.address) as (llm, single):
        assert single.status.shards[0].source == engine.status.replica
        got = answers(llm)
    trainer.worker.publish(2)
    assert got == fresh(checkpoints(KIND, 2))


def test_failed_calls_do_not_shift_later_replies(setup: Setup) -> None:
    _, _, llm, engine = setup
    for _ in range(2):
        replies = llm.collective_rpc("tensorhub", args=("update", {"version": 99, "timeout_s": 0.5}))
        assert [(reply["shard"], reply["ok"]) for reply in replies] == [(0, False), (1, False)]
        assert {reply["code"] for reply in replies} <= {"deadline_exceeded", "version_unavailable"}
        replies = llm.collective_rpc("tensorhub", args=("describe",))
        assert [(reply["shard"], reply["version"], reply["ok"]) for reply in replies] == [(0, 2, True), (1, 2, True)]
    assert engine.status.version == 2


def test_the_native_api_fails_on_all_ranks_alike_and_can_be_used_again(setup: Setup, expected: Answers) -> None:
    _, _, llm, _ = setup
    llm.init_weight_transfer_engine({"init_info": {}})
    with pytest.raises(Exception, match="start_weight_update must be called before"):
        llm.update_weights({"update_info": {"version": 2}})
    llm.start_weight_update()
    with pytest.raises(Exception, match="version must be"):
        llm.update_weights({"update_info": {"version": "newest"}})
    assert [reply["shard"] for reply in llm.collective_rpc("tensorhub", args=("describe",))] == [0, 1]
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 2}})
    llm.finish_weight_update(weight_version="2")
    assert llm.get_weight_version() == "2"
    assert answers(llm) == expected


def test_one_rank_that_reads_corrupt_bytes_stops_both(setup: Setup, expected: Answers) -> None:
    hub, _, llm, engine = setup
    with mirroring(hub.address, engine.status.replica) as mirror:
        mirror.publish(6, broken=1)
        outcome = engine.swap()
        assert outcome.version is None
        assert outcome.code in ("corrupt_transfer", "version_unavailable"), outcome
        assert engine.status.state == "paused"
        assert engine.status.shards[1].version is None
        assert engine.status.shards[0].version != 6, "rank 0 could read it, and must not have gone on alone"
        mirror.flip(shard=1)
        mirror.publish(7)
        assert engine.swap().version == 7
        assert engine.status.state == "serving"
        assert answers(llm) == expected, "version 7 is what version 2 was"


def test_one_rank_that_cannot_stage_stops_nothing(setup: Setup, expected: Answers) -> None:
    hub, _, llm, unstaged = setup
    engine = OfflineEngine(llm, {"server": hub.address, "timeout_s": 30, "staged": True})
    held = unstaged.status.version
    assert engine.status.version == held == 7
    with mirroring(hub.address, engine.status.replica) as mirror:
        mirror.publish(8, broken=1)
        outcome = engine.swap()
        assert outcome.version == held
        assert outcome.code in ("corrupt_transfer", "version_unavailable"), outcome
        assert engine.status.state == "serving"
        assert engine.status.error
        assert answers(llm) == expected
        mirror.flip(shard=1)
        mirror.publish(9)
        assert engine.swap().version == 9
        assert [report.version for report in engine.status.shards] == [9, 9]
        assert engine.status.last_swap is not None
        assert engine.status.last_swap.stage_s is not None
        assert engine.status.error is None
        assert answers(llm) == expected, "version 9 is what version 2 was"


def test_a_second_engine_of_two_ranks_copies_raw(setup: Setup, checkpoints: Checkpoints, expected: Answers) -> None:
    hub, trainer, _, engine = setup
    trainer.worker.unpublish()
    with following(checkpoints.bare(KIND), hub.address, engine=TWO) as (llm, second):
        assert {report.source for report in second.status.shards} == {engine.status.replica}
        assert [a.digest for a in second.status.shards] == [b.digest for b in engine.status.shards]
        assert answers(llm) == expected


def test_versions_stream_to_both_ranks_or_to_none(
    checkpoints: Checkpoints, hub: Server, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where loading on one of them computes what it stores: one round for both, whatever one of them cannot load."""
    monkeypatch.setenv("TENSORHUB_STAGING_BYTES", "200000")
    one, two, bare = checkpoints(KIND, 1), checkpoints(KIND, 2), checkpoints.bare(KIND)
    computing = {**TWO, "worker_extension_cls": "tests.engines.vllm.computing.ComputingExtension"}
    with (
        training(hub.address, one) as trainer,
        following(bare, hub.address, timeout_s=30, engine=computing) as (llm, engine),
    ):
        assert all("streamed in pieces" in report.note for report in engine.status.shards)
        trainer.publish(two, 2)
        assert engine.swap().version == 2
        assert answers(llm) == expected
        trainer.publish(one, 3)
        llm.collective_rpc("computing_fails", args=(1, "model.layers.1.mlp.down_proj.weight"))
        outcome = engine.swap()
        assert (outcome.version, outcome.ok) == (None, False)
        assert "down_proj.weight cannot be loaded" in outcome.message
        assert engine.status.state == "paused"
        assert [(report.version, report.served) for report in engine.status.shards] == [(None, None)] * 2
        llm.collective_rpc("computing_fails", args=(1, ""))
        trainer.publish(two, 4)
        assert engine.swap().version == 4
        assert answers(llm) == expected


def test_ranks_that_are_not_ours_are_told_apart(checkpoints: Checkpoints, bound: None) -> None:
    with running(
        checkpoints(KIND, 1), worker_extension_cls="tensorhub_vllm.worker_ext.TensorHubWorkerExtension"
    ) as llm:
        (reply,) = llm.collective_rpc("tensorhub", args=("describe",))
        assert (reply["ok"], reply["code"]) == (False, "state_error")
        assert "--weight-source tensorhub" in reply["message"]
