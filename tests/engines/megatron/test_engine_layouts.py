"""The layouts that the other tests read into are those of real models and of engines' own loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorhub_core.layout.types import Layout
from tests.property.layout.world import expected

from .engine_layouts import ModelShape, engine_layout, logical_shapes
from .models import EXPERT_FFN, FFN, HEADS, HIDDEN, LENGTH, Recipe, build
from .ranks import Ranks
from .test_layouts import shape_of

FAMILIES = {
    "llama": Recipe(tp=2),
    "llama-biases": Recipe(tp=2, biases=True),
    "qwen2": Recipe(tp=2, qkv_bias=True),
    "qwen3": Recipe(tp=2, qk_norm=True),
    "qwen3-tied": Recipe(tp=2, qk_norm=True, tied=True),
    "qwen3-moe": Recipe(tp=2, experts=4, qk_norm=True),
    "qwen2-moe": Recipe(tp=2, experts=4, qkv_bias=True, shared_expert=32),
    "mixtral": Recipe(tp=2, experts=4, mixtral=True),
}


def transformers_config(recipe: Recipe) -> Any:
    """Return the real configuration of a recipe's model, made as a user makes it."""
    import transformers

    common = {
        "vocab_size": recipe.vocab,
        "hidden_size": HIDDEN,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": recipe.groups,
        "intermediate_size": EXPERT_FFN if recipe.mixtral else FFN,
        "tie_word_embeddings": recipe.tied,
        "max_position_embeddings": LENGTH,
    }
    experts = {"num_experts": recipe.experts, "moe_intermediate_size": EXPERT_FFN, "num_experts_per_tok": 2}
    head_dim = {"head_dim": HIDDEN // HEADS}
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(attention_bias=recipe.biases, mlp_bias=recipe.biases, **common),
        "qwen2": lambda: transformers.Qwen2Config(**common),
        "qwen3": lambda: transformers.Qwen3Config(**head_dim, **common),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**head_dim, **experts, **common),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            shared_expert_intermediate_size=recipe.shared_expert, **experts, **common
        ),
        "mixtral": lambda: transformers.MixtralConfig(num_local_experts=recipe.experts, **common),
    }
    return makers[recipe.model_type]()


def _described(_: int, recipe: Recipe, config: Any) -> set[str]:
    from tensorhub_megatron.layout import describe

    described = describe(build(recipe).chunks, config)
    return {box.logical for boxes in described.boxes.values() for box in boxes}


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_a_saved_model(name: str, ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    import transformers
    from safetensors import safe_open

    recipe = FAMILIES[name]
    config = transformers_config(recipe)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    shapes = {}
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        for key in file.keys():  # noqa: SIM118
            shapes[key] = tuple(file.get_slice(key).get_shape())
    assert logical_shapes(shape_of(recipe)) == shapes
    told = json.loads((tmp_path / "config.json").read_text())
    for hf_config in (config.to_dict(), str(tmp_path), told):
        for names in ranks(2).run(_described, recipe, hf_config):
            assert names - {"lm_head.weight"} == shapes.keys() - {"lm_head.weight"}


def loaded(model: ModelShape, tp: int, rank: int, whole: dict[str, Any]) -> dict[str, Any]:
    """Return what an engine's weight loaders put into the memory of one rank, by slicing as they do."""

    def part(array: Any, axis: int) -> Any:
        return np.split(array, tp, axis)[rank]

    found = {}
    for layer in range(model.layers):
        stem = f"model.layers.{layer}."
        q, k, v = (whole[f"{stem}self_attn.{letter}_proj.weight"] for letter in "qkv")
        copies = max(1, tp // model.kv_heads)
        heads = [np.split(each, min(tp, model.kv_heads))[rank // copies] for each in (k, v)]
        found[f"{stem}self_attn.qkv_proj.weight"] = np.concatenate([part(q, 0), *heads])
        found[f"{stem}self_attn.o_proj.weight"] = part(whole[f"{stem}self_attn.o_proj.weight"], 1)
        w13, w2 = [], []
        for expert in range(model.experts):
            gate, up, down = (whole[name] for name in model.expert_names(layer, expert))
            w13.append(np.concatenate([part(gate, 0), part(up, 0)]))
            w2.append(part(down, 1))
        if model.experts:
            found[f"{stem}mlp.experts.w13_weight"], found[f"{stem}mlp.experts.w2_weight"] = np.stack(w13), np.stack(w2)
            continue
        gate, up = whole[f"{stem}mlp.gate_proj.weight"], whole[f"{stem}mlp.up_proj.weight"]
        found[f"{stem}mlp.gate_up_proj.weight"] = np.concatenate([part(gate, 0), part(up, 0)])
        found[f"{stem}mlp.down_proj.weight"] = part(whole[f"{stem}mlp.down_proj.weight"], 1)
    return found


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("experts", [0, 3])
def test_an_engines_layout_is_what_its_loaders_slice(tp: int, kv_heads: int, experts: int) -> None:
    model = replace(shape_of(Recipe(groups=kv_heads)), experts=experts, dtype="int32")
    rng = np.random.default_rng(tp)
    whole = {name: rng.integers(0, 1 << 30, shape, np.int32) for name, shape in logical_shapes(model).items()}
    bits = {name: array.view(np.uint8).reshape(*array.shape, -1) for name, array in whole.items()}
    for rank in range(tp):
        layout = engine_layout(model, tp, rank)
        held = arrays(layout, expected(layout, bits))
        for name, array in loaded(model, tp, rank, whole).items():
            assert np.array_equal(held[name], array), name


def arrays(layout: Layout, buffers: list[Any]) -> dict[str, Any]:
    """Return a layout's memory by name."""
    specs = [layout.tensors[group[0]] for group in layout.storages]
    return {spec.name: buffer.view(np.int32).reshape(spec.shape) for spec, buffer in zip(specs, buffers, strict=True)}


def test_experts_of_an_engine_that_holds_them_whole_are_a_share_each() -> None:
    model = replace(shape_of(Recipe()), experts=4)
    for rank in range(2):
        layout = engine_layout(model, 2, rank, expert_parallel=True)
        (w13,) = [spec for spec in layout.tensors if spec.name == "model.layers.0.mlp.experts.w13_weight"]
        assert w13.shape == (2, 2 * EXPERT_FFN, HIDDEN)
        owned = {box.logical.split(".")[5] for box in w13.boxes or ()}
        assert owned == {str(2 * rank), str(2 * rank + 1)}
