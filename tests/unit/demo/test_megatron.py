from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from demo.engines import Report
from demo.megatron.gathered import hugging_face, join
from demo.megatron.proof import Seen, agreed, followed, in_place, learnt, same_bytes

CONFIG = {"vocab_size": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3}
HIDDEN = 6


def whole_model() -> dict[str, Any]:
    """Return a model of one layer as Hugging Face names it, every number another one."""
    shapes = {
        "model.embed_tokens.weight": (5, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (12, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (6, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (6, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 12),
        "model.layers.0.mlp.gate_proj.weight": (8, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (8, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 8),
    }
    starts = np.cumsum([0, *(math.prod(shape) for shape in shapes.values())])
    return {
        name: (np.arange(math.prod(shape)) + start).astype(np.float32).reshape(shape)
        for (name, shape), start in zip(shapes.items(), starts, strict=False)
    }


def rank_of(model: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return what rank 0 or 1 of two tensor parallel ranks holds, written out by hand: one group, half of the rest."""
    layer = "model.layers.0."
    q, k, v = (model[f"{layer}self_attn.{letter}_proj.weight"] for letter in "qkv")
    gate, up = (model[f"{layer}mlp.{word}_proj.weight"] for word in ("gate", "up"))
    embedding = np.concatenate([model["model.embed_tokens.weight"], np.full((3, HIDDEN), -1, np.float32)])
    six, three, four = slice(6 * rank, 6 * rank + 6), slice(3 * rank, 3 * rank + 3), slice(4 * rank, 4 * rank + 4)
    ours = "decoder.layers.0."
    return {
        f"embedding.word_embeddings.weight 0 {rank}": embedding[four],
        "decoder.final_layernorm.weight -1 0": model["model.norm.weight"],
        f"{ours}input_layernorm.weight -1 0": model[f"{layer}input_layernorm.weight"],
        f"{ours}self_attention.linear_qkv.weight 0 {rank}": np.concatenate([q[six], k[three], v[three]]),
        f"{ours}self_attention.linear_proj.weight 1 {rank}": model[f"{layer}self_attn.o_proj.weight"][:, six],
        f"{ours}mlp.linear_fc1.weight 0 {rank}": np.concatenate([gate[four], up[four]]),
        f"{ours}mlp.linear_fc2.weight 1 {rank}": model[f"{layer}mlp.down_proj.weight"][:, four],
    }


def test_gathering_gives_the_model_that_was_divided() -> None:
    model = whole_model()
    found = hugging_face(join([rank_of(model, 0), rank_of(model, 1)]), CONFIG)
    assert same_bytes(3, found, model, tied=True).held
    assert found.keys() == model.keys()


def test_ranks_with_different_copies_are_refused() -> None:
    ranks = [rank_of(whole_model(), 0), rank_of(whole_model(), 1)]
    ranks[1]["decoder.final_layernorm.weight -1 0"] = np.zeros(HIDDEN, np.float32)
    with pytest.raises(ValueError, match=r"copies of decoder\.final_layernorm\.weight differ"):
        join(ranks)


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.router.weight", "vision.weight"])
def test_what_the_model_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no parameter of the demo's model"):
        hugging_face({name: np.zeros(1)}, CONFIG)


def test_one_other_byte_or_name_is_found() -> None:
    model = whole_model()
    name = "model.layers.0.mlp.up_proj.weight"
    other = {**model, name: model[name].copy()}
    other[name][-1, -1] = np.nextafter(other[name][-1, -1], np.float32(1e9))
    check = same_bytes(3, other, model, tied=False)
    assert (check.held, check.figures) == (False, f"'{name}' differs")
    minus_zero = {"a": np.array([-0.0], np.float32)}, {"a": np.array([0.0], np.float32)}
    assert not same_bytes(3, *minus_zero, tied=False).held
    assert not same_bytes(3, {n: a for n, a in model.items() if n != name}, model, tied=False).held
    assert not same_bytes(3, {}, {}, tied=False).held


def test_a_tied_head_counts_under_both_names() -> None:
    model = whole_model()
    pulled = {**model, "lm_head.weight": model["model.embed_tokens.weight"]}
    assert same_bytes(3, pulled, model, tied=True).held
    assert not same_bytes(3, pulled, model, tied=False).held
    assert not same_bytes(3, {**pulled, "lm_head.weight": pulled["lm_head.weight"] + 1}, model, tied=True).held


def seen(version: int, loss: float = 1.0, **changes: Any) -> Seen:
    report = Report(version, "serving", "", ("trainer",), 8, 0.0, 0.0, 0.0, 0.0)
    made = Seen(version, [[-loss, -loss], [-loss]], [[-loss, -loss], [-loss]], report, 10, 0, 0.1, 0.02)
    return replace(made, **changes)


def test_a_run_in_which_all_is_right_holds() -> None:
    run = [seen(0, 4.0), seen(1, 2.0), seen(2, 1.0)]
    assert learnt(run, 0.25).held
    assert followed(run, 2, "trainer").held
    assert agreed(run).held
    assert "3 tokens" in agreed(run).figures
    assert in_place(run).held


def test_each_claim_is_found_out_where_it_is_wrong() -> None:
    run = [seen(0, 4.0), seen(1, 2.0), seen(2, 1.0)]
    assert not learnt(run, 0.2).held
    assert not followed(run[:2], 2, "trainer").held, "a version is missing"
    assert not followed([run[0], run[2]], 2, "trainer").held
    other = replace(run[1].report, sources=("rollout-2", "trainer"))
    check = followed([run[0], replace(run[1], report=other), run[2]], 2, "trainer")
    assert (check.held, check.figures) == (False, "version 1 came from rollout-2")
    behind = replace(run[1].report, version=0)
    assert not followed([run[0], replace(run[1], report=behind), run[2]], 2, "trainer").held
    assert not in_place([run[0], replace(run[1], moved=1), run[2]]).held


@pytest.mark.parametrize(
    "engine", [[[-1.0, -1.0], [-1.1]], [[-1.0, math.nan], [-1.0]], [[-1.0, -math.inf], [-1.0]]], ids=str
)
def test_an_engine_that_computes_something_else_is_found(engine: list[list[float]]) -> None:
    check = agreed([seen(0), seen(1, engine=engine), seen(2)])
    assert not check.held
    assert check.figures.endswith("at version 1")


def test_answers_without_tokens_prove_nothing() -> None:
    assert not agreed([seen(0, trainer=[[]], engine=[[]])]).held
