"""Megatron's folders, without Megatron: what is served, and everything in which a folder is not the expected model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub_core.checkpoint.formats import OpenOptions, open_folder
from tensorhub_core.errors import ConfigError, LayoutMismatch, RegistrationError
from tensorhub_megatron import publish_from_checkpoint
from tests.unit.checkpoint.dcp_samples import assembled, save_dcp
from tests.unit.checkpoint.samples import bytes_of, name_of, random_tensor

HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB, PADDED, LAYERS = 8, 4, 2, 3, 10, 13, 16, 2
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "intermediate_size": FFN,
    "tie_word_embeddings": False,
}
QKV = (HEADS + 2 * GROUPS) * HEAD
SHAPES = {
    "embedding.word_embeddings.weight": (PADDED, HIDDEN),
    "decoder.layers.input_layernorm.weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, QKV, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HEADS * HEAD),
    "decoder.layers.pre_mlp_layernorm.weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, FFN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (PADDED, HIDDEN),
}
OTHERS = {
    "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(HIDDEN),
    "chained_0.optimizer.state.fp32_param.output_layer.weight": torch.ones(3),
    "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": torch.ones(1),
    "rng_state": torch.ones(2),
}


def model(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    state = {key: random_tensor(torch.bfloat16, shape, n) for n, (key, shape) in enumerate(SHAPES.items())}
    merged = {**state, **changes}
    return {key: tensor for key, tensor in merged.items() if tensor is not None}


def saved(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    save_dcp(folder, state)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def hugging_face(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Slice by hand."""
    found = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"][:VOCAB],
        "lm_head.weight": state.get("output_layer.weight", state["embedding.word_embeddings.weight"])[:VOCAB],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
    }
    for layer in range(LAYERS):
        here = {key.removeprefix("decoder.layers."): t[layer] for key, t in state.items() if "layers" in key}
        heads = here["self_attention.linear_qkv.weight"].reshape(GROUPS, -1, HEAD, HIDDEN)
        names = {
            "input_layernorm": here["input_layernorm.weight"],
            "post_attention_layernorm": here["pre_mlp_layernorm.weight"],
            "self_attn.q_proj": heads[:, :-2].reshape(-1, HIDDEN),
            "self_attn.k_proj": heads[:, -2].reshape(-1, HIDDEN),
            "self_attn.v_proj": heads[:, -1].reshape(-1, HIDDEN),
            "self_attn.o_proj": here["self_attention.linear_proj.weight"],
            "mlp.gate_proj": here["mlp.linear_fc1.weight"][:FFN],
            "mlp.up_proj": here["mlp.linear_fc1.weight"][FFN:],
            "mlp.down_proj": here["mlp.linear_fc2.weight"],
        }
        found.update({f"model.layers.{layer}.{name}.weight": tensor for name, tensor in names.items()})
    return found


def truth(state: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (name_of(t.dtype), tuple(t.shape), bytes_of(t)) for name, t in hugging_face(state).items()}


def test_weights_get_their_names_and_the_rest_is_left_out(tmp_path: Path) -> None:
    state = model()
    checkpoint = open_folder(saved(tmp_path, {**state, **OTHERS}), OpenOptions(hf_config=CONFIG))
    assert assembled(checkpoint) == truth(state)
    assert checkpoint.left_out == len(OTHERS)


def test_layers_with_keys_of_their_own(tmp_path: Path) -> None:
    state = model()
    numbered = {
        key.replace("layers.", f"layers.{layer}."): tensor[layer] if "layers" in key else tensor
        for key, tensor in state.items()
        for layer in range(LAYERS)
    }
    checkpoint = open_folder(saved(tmp_path, numbered), OpenOptions(hf_config=CONFIG))
    assert assembled(checkpoint) == truth(state)


def test_an_embedding_that_is_tied_is_served_twice_and_held_once(tmp_path: Path) -> None:
    state = model(**{"output_layer.weight": None})
    checkpoint = open_folder(saved(tmp_path, state), OpenOptions(hf_config={**CONFIG, "tie_word_embeddings": True}))
    assert assembled(checkpoint) == truth(state)
    assert checkpoint.total_bytes == sum(len(bytes_of(t)) for t in state.values())


def test_the_configuration_is_found_in_the_folder_or_asked_for(tmp_path: Path) -> None:
    folder = saved(tmp_path / "iter_0000001", model())
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    for place in (folder, tmp_path):
        with pytest.raises(ConfigError, match="give hf_config"):
            open_folder(tmp_path)
        (place / "config.json").write_text(json.dumps(CONFIG))
        assert len(open_folder(tmp_path).tensors) == len(open_folder(folder).tensors) == len(SHAPES)
        (place / "config.json").unlink()
    with pytest.raises(ConfigError, match="takes no prefix"):
        open_folder(folder, OpenOptions(prefix="model"))


def test_all_differences_from_the_configuration_are_listed(tmp_path: Path) -> None:
    state = model(**{"decoder.layers.self_attention.linear_qkv.bias": torch.ones(LAYERS, QKV, dtype=torch.bfloat16)})
    folder = saved(tmp_path, state)
    wrong = {**CONFIG, "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 20, "tie_word_embeddings": True}
    with pytest.raises(LayoutMismatch) as caught:
        open_folder(folder, OpenOptions(hf_config=wrong))
    text = str(caught.value)
    for word in (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "tie_word_embeddings",
        "biases of q, k and v",
    ):
        assert word in text
    assert len(caught.value.differences) == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 8}, "linear_qkv has 24 rows"),
        ({"vocab_size": PADDED + 1}, "the vocabulary has 17 words"),
    ],
)
def test_shapes_that_contradict_the_configuration(tmp_path: Path, change: dict[str, int], said: str) -> None:
    with pytest.raises(RegistrationError, match=said):
        open_folder(saved(tmp_path, model()), OpenOptions(hf_config={**CONFIG, **change}))


def test_unknown_keys_are_all_named_and_can_be_given_names(tmp_path: Path) -> None:
    odd = {"decoder.layers.odd.weight": torch.ones(LAYERS, 3), "value_head.weight": torch.ones(1, HIDDEN)}
    folder = saved(tmp_path, model(**odd))
    with pytest.raises(RegistrationError) as caught:
        open_folder(folder, OpenOptions(hf_config=CONFIG))
    assert all(template in str(caught.value) for template in ("decoder.layers.{layer}.odd.weight", "value_head.weight"))
    names = {"decoder.layers.{layer}.odd.weight": "model.layers.{layer}.odd", "value_head.weight": None}
    checkpoint = open_folder(folder, OpenOptions(hf_config=CONFIG, names=names))
    assert assembled(checkpoint).keys() == {*truth(model()), "model.layers.0.odd", "model.layers.1.odd"}
    assert checkpoint.left_out == 1
    with pytest.raises(ConfigError, match=r"names are given for: decoder\.x"):
        open_folder(folder, OpenOptions(hf_config=CONFIG, names={**names, "decoder.x": "y"}))


def test_another_kind_of_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no embedding"):
        open_folder(saved(tmp_path, {"a": torch.ones(3)}), OpenOptions(hf_config=CONFIG))


def test_folders_that_cannot_be_served_connect_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub_megatron.checkpoint.connect", lambda *_, **__: os.abort())
    with pytest.raises(ConfigError, match="give hf_config"):
        publish_from_checkpoint(saved(tmp_path, model()))


def test_biases_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    state = model(**{"decoder.final_layernorm.bias": torch.ones(HIDDEN, dtype=torch.bfloat16)})
    with pytest.raises(LayoutMismatch, match="bias of norm: the trainer has it, the llama model has not"):
        open_folder(saved(tmp_path, state), OpenOptions(hf_config=CONFIG))
