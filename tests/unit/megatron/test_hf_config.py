"""A Hugging Face configuration in every form users have it, and everything in which a trainer differs from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_core.errors import ConfigError, RegistrationError
from tensorhub_megatron.hf_config import TrainerFacts, differences, dims_of, read_hf_config, surplus
from tensorhub_megatron.names import Chunk, ModelDims, boxes_of, parse_key

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_experts": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False,
}
TRAINER = TrainerFacts(
    layers=2,
    hidden=64,
    heads=8,
    groups=4,
    head_dim=16,
    ffn=96,
    experts=4,
    expert_ffn=48,
    shared_ffn=32,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    zero_centered_norms=False,
    interleaved_rotary=False,
)
DIMS = ModelDims(heads=8, groups=4, head_dim=16, vocab=101)


def test_a_configuration_is_read_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for given in (CONFIG, SimpleNamespace(to_dict=lambda: CONFIG), tmp_path, str(tmp_path / "config.json")):
        assert read_hf_config(given) == CONFIG
    assert read_hf_config(None) == {}
    multimodal = read_hf_config({"model_type": "vision", "text_config": CONFIG})
    assert {key: multimodal[key] for key in CONFIG} == CONFIG


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_hf_config(tmp_path)
    with pytest.raises(ConfigError, match="int"):
        read_hf_config(3)


def test_dimensions_follow_from_the_configuration() -> None:
    assert dims_of(CONFIG) == replace(DIMS, model_type="qwen3_moe")
    plain = {"vocab_size": 10, "hidden_size": 64, "num_attention_heads": 4}
    assert dims_of(plain) == ModelDims(heads=4, groups=4, head_dim=16, vocab=10)
    with pytest.raises(ConfigError, match="vocab_size, hidden_size, num_attention_heads"):
        dims_of({})
    with pytest.raises(ConfigError, match="8 attention heads"):
        dims_of({**CONFIG, "num_key_value_heads": 3})


def test_an_equal_trainer_has_no_differences() -> None:
    assert differences(CONFIG, TRAINER) == []
    assert differences({}, TRAINER) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": 3}, "num_hidden_layers"),
        ({"hidden": 32}, "hidden_size"),
        ({"heads": 16}, "num_attention_heads"),
        ({"groups": 8}, "num_key_value_heads"),
        ({"head_dim": 8}, "head_dim"),
        ({"ffn": 95}, "intermediate_size"),
        ({"experts": None}, "num_experts"),
        ({"expert_ffn": 47}, "moe_intermediate_size"),
        ({"shared_ffn": None}, "shared_expert_intermediate_size"),
        ({"tied": True}, "tie_word_embeddings"),
        ({"qkv_bias": True}, "biases of q, k and v: the trainer has them"),
        ({"qk_norm": False}, "norms of q and k: the Hugging Face model has them"),
        ({"zero_centered_norms": True}, "layernorm_zero_centered_gamma: the trainer's norms are smaller by one"),
        ({"interleaved_rotary": True}, "rotary_interleaved"),
    ],
)
def test_every_difference_is_found(change: dict[str, Any], text: str) -> None:
    (found,) = differences(CONFIG, replace(TRAINER, **change))
    assert text in found


def test_all_differences_are_listed_at_once() -> None:
    other = replace(TRAINER, layers=9, hidden=9, heads=9, tied=True, qk_norm=False)
    assert len(differences(CONFIG, other)) == 5


def test_mixtrals_intermediate_size_is_that_of_its_experts() -> None:
    config = {"model_type": "mixtral", "intermediate_size": 48, "num_local_experts": 4}
    trainer = replace(TRAINER, qk_norm=False, ffn=None)
    assert differences(config, trainer) == []
    (found,) = differences({**config, "intermediate_size": 96}, trainer)
    assert "intermediate_size" in found


@pytest.mark.parametrize(
    ("key", "shape", "text"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", (100, 64), "100 rows"),
        ("decoder.layers.0.mlp.linear_fc1.weight", (7, 64), "7 rows"),
        ("embedding.word_embeddings.weight", (96, 64), "101 words"),
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (2, 4), "lacks axes"),
    ],
)
def test_shapes_that_contradict_the_model_are_refused(key: str, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(RegistrationError, match=text):
        boxes_of(key, Chunk(shape, (0,) * len(shape), shape), DIMS)


@pytest.mark.parametrize(
    ("key", "template"),
    [
        ("decoder.layers.mlp.router.expert_bias", "decoder.layers.{layer}.mlp.router.expert_bias"),
        ("decoder.layers.7.mlp.router.expert_bias", "decoder.layers.{layer}.mlp.router.expert_bias"),
        ("decoder.layers.mlp.experts.experts.linear_fc9.w", "decoder.layers.{layer}.mlp.experts.{expert}.linear_fc9.w"),
        ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.weight"),
    ],
)
def test_a_key_without_a_name_is_unknown_until_it_is_given_one(key: str, template: str) -> None:
    parsed = parse_key(key)
    assert parsed.template == template
    shape = (2,) * parsed.axes + (4, 3)
    chunk = Chunk(shape, (1,) * parsed.axes + (1, 0), (1,) * parsed.axes + (2, 3))
    assert boxes_of(key, chunk, DIMS) is None
    assert boxes_of(key, chunk, DIMS, {template: None}) == ()
    name = "own" + "".join(f".{{{field}}}" for field in ("layer", "expert") if f"{{{field}}}" in template)
    (box,) = boxes_of(key, chunk, DIMS, {template: name}) or ()
    layer = 1 if parsed.layer is None else parsed.layer
    assert box.logical == name.format(layer=layer, expert=1)
    assert (box.offset, box.shape) == ((1, 0), (2, 3))


@pytest.mark.parametrize("name", ["", "own", "own.{expert}", "own.{layer}.{expert}", "own.{layer", "own.{0}.{layer}"])
def test_a_name_that_does_not_fit_its_key_is_refused(name: str) -> None:
    key = "decoder.layers.mlp.router.expert_bias"
    template = "decoder.layers.{layer}.mlp.router.expert_bias"
    with pytest.raises(RegistrationError, match=r"it has to have \{layer\}, as the key does"):
        boxes_of(key, Chunk((2, 4), (0, 0), (1, 4)), DIMS, {template: name})


@pytest.mark.parametrize("kind", ["gemma", "gemma3_text", "nemotron", "qwen3_next"])
def test_norms_are_those_of_the_family(kind: str) -> None:
    config = {**CONFIG, "model_type": kind}
    for has, said in ((True, []), (None, []), (False, ["trainer's norms are larger by one"])):
        found = differences(config, replace(TRAINER, zero_centered_norms=has))
        assert [text for text in found if "norms" in text and "q and k" not in text] == [
            f"layernorm_zero_centered_gamma: the {text} than the engine's" for text in said
        ]


@pytest.mark.parametrize(
    ("config", "had"),
    [
        ({"model_type": "llama"}, set()),
        ({"model_type": "llama", "attention_bias": True}, {"o_proj"}),
        ({"model_type": "qwen3", "attention_bias": True, "mlp_bias": True}, {"o_proj"}),
        ({"model_type": "qwen2", "attention_bias": True}, set()),
        ({"model_type": "llama", "mlp_bias": True}, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_biases_that_an_engine_would_not_ask_for_are_named(config: dict[str, Any], had: set[str]) -> None:
    modules = (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "input_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    names = [
        f"model.layers.{layer}.{module}.{kind}" for layer in (0, 1) for module in modules for kind in ("weight", "bias")
    ]
    names += ["model.norm.weight", "lm_head.weight", "lm_head.bias"]
    lost = sorted({"o_proj", "input_layernorm", "gate_proj", "up_proj", "down_proj", "lm_head"} - had)
    kind = config["model_type"]
    assert surplus(config, names) == [
        f"bias of {module}: the trainer has it, the {kind} model has not" for module in lost
    ]
    assert surplus({**config, "model_type": "gpt2"}, names) == []
