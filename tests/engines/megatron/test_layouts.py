"""Every way in which Megatron divides a model: engines' ranks get the bytes that gathering and slicing gives them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tensorhub_core.layout.plan import plan_read
from tests.property.layout.world import Bytes, execute, expected, sums_of

from .engine_layouts import ModelShape, engine_layout, logical_shapes
from .models import EXPERT_FFN, FFN, HEAD_DIM, HEADS, HIDDEN, Recipe
from .ranks import Ranks
from .reference import hugging_face
from .shares import SEGMENT_BYTES, Sent, send
from .trainer_layouts import Grid, trainer_layouts

RECIPES = {
    "tp2-bias": Recipe(tp=2, qkv_bias=True),
    "tp2-all-biases": Recipe(tp=2, biases=True, groups=8),
    "tp2-one-group": Recipe(tp=2, groups=1, qk_norm=True),
    "tp2-fused-norms": Recipe(tp=2, fused_norms=True, qk_norm=True),
    "tp2-tied": Recipe(tp=2, tied=True),
    "pp2": Recipe(pp=2),
    "pp2-tied": Recipe(pp=2, tied=True, qk_norm=True),
    "vpp2": Recipe(pp=2, vpp=2, layers=4, qk_norm=True),
    "vpp2-tied": Recipe(pp=2, vpp=2, layers=4, tied=True),
    "dp2": Recipe(dp=2),
    "dp2-optimizer-overlap": Recipe(dp=2, dist_opt=True, overlap=True, qkv_bias=True),
    "dp2-float32": Recipe(dp=2, bf16=False, dist_opt=True),
    "ep2": Recipe(dp=2, ep=2, experts=4, qk_norm=True),
    "ep2-optimizer-overlap": Recipe(dp=2, ep=2, experts=4, dist_opt=True, overlap=True, qk_norm=True),
    "ep2-mixtral": Recipe(dp=2, ep=2, experts=4, mixtral=True),
    "ep2-grouped": Recipe(dp=2, ep=2, experts=4, experts_as="grouped", qk_norm=True),
    "ep2-te-grouped": Recipe(dp=2, ep=2, experts=4, experts_as="te_grouped", qk_norm=True),
    "tp2-experts": Recipe(tp=2, experts=4, qk_norm=True),
    "tp2-grouped": Recipe(tp=2, experts=4, experts_as="grouped", mixtral=True),
    "tp2-te-grouped": Recipe(tp=2, experts=4, experts_as="te_grouped", fused_norms=True, qk_norm=True),
    "tp2-some-dense-shared": Recipe(tp=2, layers=3, experts=4, moe_layers=(0, 1, 0), shared_expert=32, qkv_bias=True),
    "tp2-ep2": Recipe(tp=2, ep=2, etp=1, experts=4, qk_norm=True),
    "pp2-experts": Recipe(pp=2, layers=4, experts=2, qk_norm=True),
    "tp2-pp2": Recipe(tp=2, pp=2, qk_norm=True, qkv_bias=True),
    "tp2-pp2-tied-optimizer": Recipe(tp=2, pp=2, tied=True, dist_opt=True, overlap=True),
    "tp2-dp2-ep2": Recipe(tp=2, dp=2, ep=2, experts=4, dist_opt=True, qk_norm=True),
    "pp2-ep2-grouped": Recipe(pp=2, dp=2, ep=2, experts=4, experts_as="grouped", qk_norm=True),
    "tp4": Recipe(tp=4),
    "tp4-rank-of-padding": Recipe(tp=4, vocab=20, tied=True),
    "pp2-uneven": Recipe(pp=2, layers=3, first_stage_layers=1, qk_norm=True),
    "tp4-two-groups": Recipe(tp=4, groups=2, qkv_bias=True, tied=True),
    "tp4-te-grouped": Recipe(tp=4, ep=4, etp=1, experts=8, experts_as="te_grouped", qk_norm=True),
}


def shape_of(recipe: Recipe) -> ModelShape:
    """Return the sizes of a recipe's model."""
    dense = frozenset(n for n, moe in enumerate(recipe.moe_layers) if not moe) if recipe.moe_layers else frozenset()
    return ModelShape(
        hidden=HIDDEN,
        layers=recipe.layers,
        heads=HEADS,
        kv_heads=recipe.groups,
        head_dim=HEAD_DIM,
        vocab=recipe.vocab,
        ffn=FFN,
        experts=recipe.experts,
        expert_ffn=EXPERT_FFN,
        shared_ffn=recipe.shared_expert,
        dense_layers=dense,
        tied=recipe.tied,
        qkv_bias=recipe.qkv_bias or recipe.biases,
        biases=recipe.biases,
        qk_norm=recipe.qk_norm,
        mixtral_names=recipe.mixtral,
        dtype="bfloat16" if recipe.bf16 else "float32",
    )


def grid_of(recipe: Recipe) -> Grid:
    """Return how a recipe divides the model."""
    return Grid(
        tp=recipe.tp,
        pp=recipe.pp,
        dp=recipe.dp,
        ep=recipe.ep,
        etp=recipe.tp if recipe.etp is None else recipe.etp,
        vocab_multiple=8,
        fused_norms=recipe.fused_norms,
        grouped_experts=recipe.experts_as == "te_grouped",
    )


def truth_of(sent: list[Sent], recipe: Recipe) -> dict[str, Bytes]:
    """Return the gathered model as u8 [*shape, item bytes], and check that it is the model that was asked for."""
    gathered = hugging_face([each.shares for each in sent], recipe)
    assert {name: array.shape for name, array in gathered.items()} == logical_shapes(shape_of(recipe))
    return {name: array.view(np.uint8).reshape(*array.shape, -1) for name, array in gathered.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_engines_get_what_gathering_and_slicing_gives(name: str, ranks: Callable[[int], Ranks]) -> None:
    recipe = RECIPES[name]
    sent = ranks(recipe.world).run(send, recipe)
    truth = truth_of(sent, recipe)
    sources, memory = [each.layout for each in sent], [each.memory for each in sent]
    if recipe.experts_as != "grouped" and recipe.vpp is None and recipe.first_stage_layers is None:
        assert sources == trainer_layouts(shape_of(recipe), grid_of(recipe), SEGMENT_BYTES)
    sums = [sums_of(*pair) for pair in zip(sources, memory, strict=True)]
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            destination = engine_layout(shape_of(recipe), tp, rank)
            plan = plan_read(destination, sources, sums)
            buffers, writes = execute(plan, destination, sources, memory)
            assert max(int(each.max()) for each in writes) == 1
            for group, got, want in zip(destination.storages, buffers, expected(destination, truth), strict=True):
                assert np.array_equal(got, want), (tp, rank, destination.tensors[group[0]].name)
