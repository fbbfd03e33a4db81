"""Other ways to begin: bootstrap from disk, vLLM's own weight-transfer API, loading that boxes cannot express."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tensorhub_core import ConfigError, DeadlineExceeded, Server, VersionUnavailable, connect
from tensorhub_core.engine.config import weight_source_config
from tensorhub_vllm import engine_args

from ..models import Checkpoints, Trainer, training
from .engines import answers, following, fresh, running, shard_of

pytestmark = pytest.mark.timeout(300)
KIND = "dense-untied"


def test_bootstrap_publishes_version_0_which_fills_others(checkpoints: Checkpoints, hub: Server) -> None:
    with following(checkpoints(KIND, 1), hub.address, bootstrap=True) as (llm, engine):
        expected = answers(llm)
        assert (engine.status.version, engine.status.shards[0].source) == (0, "disk")
        with following(checkpoints(KIND, 2), hub.address, bootstrap=True) as (other, second):
            assert second.status.shards[0].source == engine.status.replica, "a version exists: disk is not read"
            assert second.status.shards[0].digest == engine.status.shards[0].digest
            assert answers(other) == expected
        assert expected == fresh(checkpoints(KIND, 1))


def test_a_bootstrap_that_comes_second_fills_from_peers(
    checkpoints: Checkpoints, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines may both find nothing; the slower one must not insist on its version 0."""
    from tensorhub_vllm.loader import HubSession

    expected = fresh(checkpoints(KIND, 2))
    monkeypatch.setattr(HubSession, "nothing_there", lambda self: True)
    with (
        training(hub.address, checkpoints(KIND, 2), version=5),
        following(checkpoints(KIND, 1), hub.address, bootstrap=True) as (llm, engine),
    ):
        assert (engine.status.version, engine.status.shards[0].source) == (5, "trainer")
        assert answers(llm) == expected


def test_an_engine_waits_for_the_first_version(checkpoints: Checkpoints, hub: Server) -> None:
    published = threading.Event()

    def publish() -> None:
        time.sleep(1.0)
        with connect(hub.address, model="policy", replica="late") as worker:
            Trainer(worker, checkpoints(KIND, 1), 7)
            published.wait(60)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        with following(checkpoints.bare(KIND), hub.address) as (_, engine):
            assert engine.status.version == 7
    finally:
        published.set()
        thread.join()


def test_an_engine_without_any_version_says_what_it_waited_for(checkpoints: Checkpoints, hub: Server) -> None:
    with (
        pytest.raises(DeadlineExceeded, match=f"no version of model 'policy' at {hub.address} within 1 s"),
        following(checkpoints.bare(KIND), hub.address, timeout_s=1),
    ):
        pytest.fail("the engine started")


def test_what_no_engine_can_do_is_a_config_error(checkpoints: Checkpoints, hub: Server) -> None:
    with (
        training(hub.address, checkpoints(KIND, 1)),
        pytest.raises(ConfigError, match="cast"),
        following(checkpoints.bare(KIND), hub.address, cast="fp8"),
    ):
        pytest.fail("the engine started")
    with pytest.raises(ConfigError, match="sever"):
        engine_args({"sever": hub.address})


def test_the_native_weight_transfer_api_updates_an_engine_loaded_from_disk(
    checkpoints: Checkpoints, hub: Server
) -> None:
    one, two = checkpoints(KIND, 1), checkpoints(KIND, 2)
    expected = {1: fresh(one), 2: fresh(two)}
    with (
        training(hub.address, two, version=2) as trainer,
        running(one, weight_transfer_config={"backend": "tensorhub"}) as llm,
    ):
        assert answers(llm) == expected[1]
        llm.init_weight_transfer_engine({"init_info": {"server": hub.address, "timeout_s": 5}})
        assert answers(llm) == expected[1], "connecting changes nothing"
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": "latest"}})
        llm.finish_weight_update(weight_version="2")
        llm.reset_prefix_cache()
        assert answers(llm) == expected[2]
        llm.start_weight_update()
        with pytest.raises((DeadlineExceeded, VersionUnavailable)):
            llm.update_weights({"update_info": {"version": 9}})
        trainer.publish(one, 10)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": 10}})
        llm.finish_weight_update(weight_version="10")
        llm.reset_prefix_cache()
        assert answers(llm) == expected[1], "a failed update leaves the session usable"


def test_loading_that_computes_is_streamed(
    checkpoints: Checkpoints, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM

    one, two, bare = checkpoints(KIND, 1), checkpoints(KIND, 2), checkpoints.bare(KIND)
    expected = {1: fresh(one), 2: fresh(two)}
    original = LlamaForCausalLM.load_weights
    keeps_all = [False]

    def computing(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        computed = ((name, weight * 1) for name, weight in (list(weights) if keeps_all[0] else weights))
        return original(self, computed)

    monkeypatch.setattr(LlamaForCausalLM, "load_weights", computing)
    monkeypatch.setenv("TENSORHUB_STAGING_BYTES", "100000")  # many pieces, of which some are one large tensor
    with training(hub.address, one) as trainer, following(bare, hub.address) as (llm, engine):
        assert answers(llm) == expected[1]
        assert "streamed in pieces" in engine.status.as_json()["shards"][0]["note"]
        trainer.worker.unpublish()
        with following(bare, hub.address) as (other, second):
            assert second.status.shards[0].source == engine.status.replica, "equal configurations copy raw"
            assert answers(other) == expected[1]
            trainer.publish(two, 2)
            keeps_all[0] = True
            outcome = engine.swap()
            assert (outcome.version, outcome.code) == (2, "")
            assert answers(llm) == expected[2], "a loader may keep tensors until others have come"


def test_raw_memory_is_not_changed_by_processing(checkpoints: Checkpoints, hub: Server) -> None:
    """What is offered while it is processed must stay what its checksums say."""
    for kind in ("dense-tied", "moe", "mla"):
        with (
            training(hub.address, checkpoints(kind, 1), stream=kind),
            following(checkpoints.bare(kind), hub.address) as (llm, _),
        ):
            shard = shard_of(llm)
            before = {name: tensor.clone() for name, tensor in shard.fit.tensors.items()}
            assert shard.process().ok
            for name, tensor in shard.fit.tensors.items():
                assert torch.equal(before[name].view(torch.uint8), tensor.view(torch.uint8)), (kind, name)


def test_no_second_copy_of_what_processing_leaves_alone(checkpoints: Checkpoints, hub: Server) -> None:
    with training(hub.address, checkpoints(KIND, 1)), following(checkpoints.bare(KIND), hub.address) as (llm, _):
        shard = shard_of(llm)
        live = {parameter.data_ptr() for parameter in shard.memory.model.parameters() if parameter.numel()}
        kept = {name: tensor.data_ptr() for name, tensor in shard.fit.tensors.items()}
        alone = {name for name, pointer in kept.items() if pointer in live}
        assert {name for name in kept if "norm" in name or "embed" in name or "lm_head" in name} <= alone
        packed = set(kept) - alone
        assert packed, "on the CPU vLLM packs linear weights"
        assert all("proj" in name for name in packed)


def test_config_round_trip_through_vllm_arguments() -> None:
    config = weight_source_config({"server": "tcp://127.0.0.1:1", "follow": False})
    extra = engine_args(config)["model_loader_extra_config"]
    assert weight_source_config(extra["weight_source"]) == config
