"""What cannot be published, or not read, is refused before a byte moves, with every reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tensorhub_core.errors import LayoutMismatch, RegistrationError
from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.plan import plan_read
from tensorhub_megatron.layout import describe
from tests.property.layout.world import sums_of

from .engine_layouts import engine_layout
from .models import Recipe, build
from .ranks import Ranks
from .shares import Sent, send
from .test_layouts import shape_of

Job = Callable[[int], Ranks]

PP_TIED = Recipe(pp=2, tied=True)
WORDS = ("model.embed_tokens.weight", "lm_head.weight")


def refusal(sent: Sequence[Sent], destination: Any) -> tuple[str, ...]:
    """Return the differences for which a read is refused."""
    sums = [sums_of(each.layout, each.memory) for each in sent]
    with pytest.raises(LayoutMismatch) as caught:
        plan_read(destination, [each.layout for each in sent], sums)
    return caught.value.differences


def test_copies_of_a_tied_embedding_that_differ_are_refused(ranks: Job) -> None:
    sent = ranks(2).run(send, PP_TIED, {"1:output_layer.weight": 1})
    differences = refusal(sent, engine_layout(shape_of(PP_TIED), 1, 0))
    assert [line for line in differences if "model.embed_tokens.weight" in line and "different bytes" in line]


def test_data_parallel_ranks_that_drifted_apart_are_refused(ranks: Job) -> None:
    recipe = Recipe(dp=2)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    sent = ranks(2).run(send, recipe, {f"1:{name}": 1})
    (difference,) = refusal(sent, engine_layout(shape_of(recipe), 2, 1))
    assert "model.layers.1.mlp.down_proj.weight" in difference
    assert "different bytes" in difference


def test_an_engine_may_have_the_words_tied_or_apart(ranks: Job) -> None:
    sent = ranks(2).run(send, PP_TIED)
    sources = [each.layout for each in sent]
    sums = [sums_of(each.layout, each.memory) for each in sent]
    for tied in (True, False):
        destination = engine_layout(replace(shape_of(PP_TIED), tied=tied), 1, 0)
        assert ("lm_head.weight" in {spec.name for spec in destination.tensors}) is not tied
        plan_read(destination, sources, sums)
    both = engine_layout(replace(shape_of(PP_TIED), tied=False), 1, 0)
    plan_read(build_layout(both.tensors, [WORDS], shard=0, num_shards=1), sources, sums)


def test_words_that_an_engine_ties_are_refused_where_the_trainer_has_them_apart(ranks: Job) -> None:
    recipe = Recipe(pp=2)
    sent = ranks(2).run(send, recipe)
    both = engine_layout(shape_of(recipe), 1, 0)
    (difference,) = refusal(sent, build_layout(both.tensors, [WORDS], shard=0, num_shards=1))
    assert "tied" in difference
    assert all(name in difference for name in WORDS)


def test_an_engine_with_another_model_is_told_all_differences(ranks: Job) -> None:
    recipe = Recipe(tp=2, qk_norm=True)
    sent = ranks(2).run(send, recipe)
    right = shape_of(recipe)
    larger = replace(right, vocab=right.vocab + 9, layers=right.layers + 1, ffn=right.ffn + 32, qkv_bias=True)
    differences = refusal(sent, engine_layout(larger, 1, 0))
    for missing in ("model.layers.0.self_attn.q_proj.bias", "model.layers.2.self_attn.q_proj.weight"):
        assert any("missing" in line and missing in line for line in differences), missing
    for short in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate_proj.weight"):
        assert any("gap" in line and short in line for line in differences), short


def test_an_engine_with_another_dtype_is_told_so_for_every_tensor(ranks: Job) -> None:
    recipe = Recipe(dp=2, bf16=False)
    sent = ranks(2).run(send, recipe)
    destination = engine_layout(replace(shape_of(recipe), dtype="bfloat16"), 2, 0)
    differences = refusal(sent, destination)
    wanted = {box.logical for spec in destination.tensors for box in spec.boxes or ()}
    assert len([line for line in differences if "dtype" in line]) == len(wanted)


def _refuse(_: int, recipe: Recipe, changes: dict[str, Any]) -> str:
    built = build(recipe)
    try:
        describe(built.chunks, {**recipe.hf_config(), **changes})
    except RegistrationError as error:
        return str(error)
    return ""


def test_another_configuration_is_refused_with_all_differences(ranks: Job) -> None:
    changes = {
        "model_type": "llama",
        "attention_bias": False,
        "vocab_size": 1000,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "intermediate_size": 97,
        "tie_word_embeddings": True,
        "num_experts": 4,
    }
    for text in ranks(2).run(_refuse, Recipe(tp=2, qk_norm=True, qkv_bias=True), changes):
        for key in (*list(changes)[3:], "1000 words", "biases of q, k and v", "norms of q and k"):
            assert key in text, (key, text)


def _strange(built: Any) -> None:
    """Give the model parameters that no table knows."""
    attention = built.chunks[0].module.decoder.layers[1].self_attention
    attention.linear_proj.register_parameter("magic", torch.nn.Parameter(torch.ones(3)))
    built.chunks[0].module.decoder.layers[0].mlp.register_parameter("wand", torch.nn.Parameter(torch.ones(2)))


def _describe_strange(_: int, recipe: Recipe, extra_names: dict[str, str | None] | None) -> Any:
    built = build(recipe)
    _strange(built)
    try:
        described = describe(built.chunks, recipe.hf_config(), extra_names=extra_names)
    except RegistrationError as error:
        return str(error)
    return {box.logical for boxes in described.boxes.values() for box in boxes}


def test_unknown_parameters_are_all_named_and_can_be_given_names(ranks: Job) -> None:
    recipe = Recipe(tp=2)
    magic, wand = (f"decoder.layers.{{layer}}.{name}" for name in ("self_attention.linear_proj.magic", "mlp.wand"))
    for text in ranks(2).run(_describe_strange, recipe, None):
        assert magic in text
        assert wand in text
        assert "extra_names" in text
    for names in ranks(2).run(_describe_strange, recipe, {magic: "model.layers.{layer}.magic", wand: None}):
        assert isinstance(names, set), names
        assert "model.layers.1.magic" in names
        assert not [name for name in names if "wand" in name]


def _follow(_: int, recipe: Recipe) -> list[str]:
    built = build(recipe)
    first, second = (describe(built.chunks, recipe.hf_config()) for _ in range(2))
    assert first.boxes == second.boxes
    assert list(first.tensors) == list(second.tensors)
    with torch.no_grad():
        for name, tensor in first.tensors.items():
            parameter = first.parameters[name]
            assert tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr(), name
            parameter.fill_(7)
            assert bool((tensor == 7).all()), name
    moved = first.parameters["decoder.final_layernorm.weight"]
    moved.data = moved.data.clone()
    return first.moved()


@pytest.mark.parametrize("kind", ["sequential", "grouped", "te_grouped"])
def test_the_live_parameters_are_described_and_one_that_moved_is_named(kind: str, ranks: Job) -> None:
    recipe = Recipe(dp=2, ep=2, experts=4, experts_as=kind, qk_norm=True, dist_opt=True)
    assert ranks(2).run(_follow, recipe) == [["decoder.final_layernorm.weight"]] * 2


def _without_config(rank: int, recipe: Recipe) -> Any:
    built = build(recipe)
    described = describe(built.chunks)
    return {name: described.boxes[name] for name in described.boxes}


def test_without_a_configuration_names_are_llamas_and_padding_counts(ranks: Job) -> None:
    recipe = Recipe(tp=2)
    both = ranks(2).run(_without_config, recipe)
    words = [boxes["embedding.word_embeddings.weight"][0] for boxes in both]
    assert {box.logical for box in words} == {"model.embed_tokens.weight"}
    assert sum(box.shape[0] for box in words) == recipe.padded_vocab
    assert np.all([box.offset[0] == rank * recipe.padded_vocab // 2 for rank, box in enumerate(words)])


def _with_setting(_: int, name: str, value: Any) -> str:
    recipe = Recipe(tp=2, experts=4, qk_norm=True)
    built = build(recipe)
    setattr(built.config, name, value)
    try:
        describe(built.chunks, recipe.hf_config())
    except RegistrationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layernorm_zero_centered_gamma", True),
        ("rotary_interleaved", True),
        ("attention_output_gate", True),
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_shared_expert_glu_interleave_size", 32),
    ],
)
def test_settings_that_give_rows_another_meaning_are_refused(name: str, value: Any, ranks: Job) -> None:
    for text in ranks(2).run(_with_setting, name, value):
        assert name in text


def _tampered(_: int, how: str) -> str:
    """Describe a model whose state dict is not made of its parameters as they lie."""
    built = build(Recipe(tp=2))
    model = built.chunks[0].module
    own = model.sharded_state_dict

    def tampered() -> Any:
        state = own()
        if how == "copy":
            value = state["decoder.final_layernorm.weight"]
            value.data = value.data.clone()
        else:
            factory = state["decoder.layers.0.mlp.linear_fc1.weight"]
            build_own = factory.build_fn
            factory.build_fn = lambda *args: list(reversed(build_own(*args)))
        return state

    model.sharded_state_dict = tampered
    try:
        describe(built.chunks)
    except RegistrationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "text"),
    [("copy", "gives copies of these: decoder.final_layernorm.weight"), ("order", "rearranges 'decoder.layers.0.mlp")],
)
def test_what_is_not_the_parameters_own_memory_is_refused(how: str, text: str, ranks: Job) -> None:
    for found in ranks(2).run(_tampered, how):
        assert text in found


def test_what_is_no_megatron_model_is_refused() -> None:
    with pytest.raises(RegistrationError, match="Linear is not a model of megatron-core"):
        describe([torch.nn.Linear(2, 2)])
