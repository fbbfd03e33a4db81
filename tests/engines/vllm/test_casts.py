"""A float32 checkpoint in an engine that computes in bfloat16: only where that was asked for, and as vLLM rounds it."""

from __future__ import annotations

from typing import Any

import pytest

from tensorhub_core import LayoutMismatch, Server

from ..models import Checkpoints, training
from .engines import answers, following, fresh

pytestmark = pytest.mark.timeout(300)
KIND = "float32"
SHORT = {"dtype": "bfloat16"}


def test_it_is_refused_before_a_byte_and_says_how_to_ask(checkpoints: Checkpoints, hub: Server) -> None:
    with (
        training(hub.address, checkpoints(KIND, 1)),
        pytest.raises(LayoutMismatch, match='"cast": true') as refused,
        following(checkpoints.bare(KIND), hub.address, engine=SHORT),
    ):
        pytest.fail("the engine started")
    assert len(refused.value.differences) > 10
    assert all(line.startswith("dtype of ") for line in refused.value.differences)


@pytest.mark.parametrize("more", [{}, {"staged": True}], ids=["updated", "staged"])
def test_an_engine_answers_like_one_that_loaded_the_checkpoint_in_its_dtype(
    checkpoints: Checkpoints, hub: Server, more: dict[str, Any]
) -> None:
    first, second = (fresh(checkpoints(KIND, seed), **SHORT) for seed in (1, 2))
    assert first != fresh(checkpoints(KIND, 1), dtype="float32"), "rounding is seen"
    with (
        training(hub.address, checkpoints(KIND, 1)) as trainer,
        following(checkpoints.bare(KIND), hub.address, engine=SHORT, cast=True, **more) as (llm, engine),
    ):
        assert answers(llm) == first
        with following(checkpoints.bare(KIND), hub.address, engine=SHORT, cast="bf16") as (other, beside):
            assert beside.status.shards[0].source == engine.status.replica, "what is converted is not converted again"
            assert beside.status.shards[0].digest == engine.status.shards[0].digest
            assert answers(other) == first
            trainer.publish(checkpoints(KIND, 2), 2)
            for which, swapped, source in ((llm, engine, "trainer"), (other, beside, engine.status.replica)):
                outcome = swapped.swap()
                assert (outcome.version, outcome.code) == (2, "")
                assert swapped.status.shards[0].source == source
                assert answers(which) == second
