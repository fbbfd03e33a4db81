"""What does not fit or breaks half way: refused before a byte with every difference, or no mix is ever served."""

from __future__ import annotations

import pytest
import torch

from tensorhub_core import LayoutMismatch, Server, connect

from ..models import Checkpoints, Trainer, training
from .engines import answers, following, fresh, shard_of

pytestmark = pytest.mark.timeout(300)
KIND = "dense-untied"


def image(llm) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    return {name: tensor.clone() for name, tensor in shard_of(llm).fit.tensors.items()}


def unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    as_bytes = [(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before]
    return set(before) == set(after) and all(torch.equal(one, other) for one, other in as_bytes)


@pytest.mark.parametrize(
    ("published", "words", "least"),
    [
        ("wider", ["q_proj.weight", "embed_tokens.weight", "256"], 15),
        ("deeper", ["model.layers.2."], 1),
        ("float32", ["dtype of", "float32", "bfloat16"], 20),
        ("moe", ["mlp.experts", "mlp.gate_up_proj"], 3),
    ],
)
def test_an_engine_of_another_model_is_refused_with_all_differences(
    published: str, words: list[str], least: int, checkpoints: Checkpoints, hub: Server
) -> None:
    with (
        training(hub.address, checkpoints(published, 1)),
        pytest.raises(LayoutMismatch) as caught,
        following(checkpoints.bare(KIND), hub.address),
    ):
        pytest.fail("the engine started")
    text = "\n".join(caught.value.differences)
    assert len(caught.value.differences) >= least, text
    for word in words:
        assert word in text
    assert str(caught.value).count("\n") >= least, "the message lists them too"


def test_a_running_engine_refuses_another_model_and_goes_on(checkpoints: Checkpoints, hub: Server) -> None:
    with (
        training(hub.address, checkpoints(KIND, 1)) as trainer,
        following(checkpoints.bare(KIND), hub.address) as (llm, engine),
    ):
        expected = answers(llm)
        for version, other in ((2, "wider"), (3, "float32"), (4, "deeper")):
            before = image(llm)
            with connect(hub.address, model="policy", replica="other") as worker:
                Trainer(worker, checkpoints(other, 1), version)
                outcome = engine.swap()
                assert (outcome.version, outcome.code) == (1, "layout_mismatch"), outcome
            assert unchanged(before, image(llm)), "not a byte of a refused version is written"
            assert (engine.status.state, engine.status.version) == ("serving", 1)
            assert engine.status.error is not None
            assert answers(llm) == expected
        trainer.publish(checkpoints(KIND, 2), 5)
        assert engine.swap().version == 5
        assert engine.status.error is None


def test_a_corrupt_source_leaves_no_mix_and_the_next_version_heals(checkpoints: Checkpoints, hub: Server) -> None:
    expected = fresh(checkpoints(KIND, 2))
    with (
        training(hub.address, checkpoints(KIND, 1)) as trainer,
        following(checkpoints.bare(KIND), hub.address, timeout_s=20) as (llm, engine),
    ):
        trainer.publish(checkpoints(KIND, 2), 2)
        flat = trainer.tensors["lm_head.weight"].view(torch.uint8).view(-1)
        flat[-1] ^= 1
        outcome = engine.swap()
        assert outcome.code in ("corrupt_transfer", "version_unavailable"), outcome
        assert outcome.version is None
        assert (engine.status.state, engine.status.version) == ("paused", None)
        assert engine.status.error
        assert engine.status.shards[0].version is None
        assert shard_of(llm).report().served is None, "a half filled memory is not processed"
        flat[-1] ^= 1
        trainer.publish(checkpoints(KIND, 2), 3)
        assert engine.swap().version == 3
        assert engine.status.state == "serving"
        assert answers(llm) == expected


def test_nothing_is_touched_while_no_newer_version_exists(checkpoints: Checkpoints, hub: Server) -> None:
    with (
        training(hub.address, checkpoints(KIND, 1)),
        following(checkpoints.bare(KIND), hub.address, timeout_s=20) as (_, engine),
    ):
        assert (engine.swap().version, engine.swap().changed) == (1, False)
        outcome = engine.swap(99)
        assert (outcome.version, outcome.code) == (1, "version_unavailable")
        assert engine.status.state == "serving"
