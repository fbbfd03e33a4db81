"""Parts of Megatron's global tensors, cut in any way, hold what slicing the whole model says. numpy is the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tensorhub_megatron.names import Chunk, ModelDims, boxes_of

LAYERS, EXPERTS, HIDDEN, HEAD, FFN, VOCAB, PADDED = 3, 4, 5, 2, 6, 7, 9
Array = NDArray[np.int64]


@dataclass(frozen=True)
class Whole:
    """A tensor of one layer (and expert) as Megatron has it, and its parts under Hugging Face names."""

    key: str
    expert_key: str
    array: Array
    parts: dict[str, Array]


class _Numbers:
    """Gives every element of a model its own number."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, *shape: int) -> Array:
        size = int(np.prod(shape))
        self._next += size
        return np.arange(self._next - size, self._next).reshape(shape)


def _qkv(fresh: _Numbers, dims: ModelDims, stem: str, kind: str) -> Whole:
    tail = (HIDDEN,) if kind == "weight" else ()
    per_group = dims.heads // dims.groups
    q = fresh(dims.heads * HEAD, *tail)
    k, v = fresh(dims.groups * HEAD, *tail), fresh(dims.groups * HEAD, *tail)
    blocks = [
        np.concatenate([whole.reshape(dims.groups, -1, *tail)[group] for whole in (q, k, v)])
        for group in range(dims.groups)
    ]
    assert len(blocks[0]) == (per_group + 2) * HEAD
    names = {f"{stem}self_attn.{letter}_proj.{kind}": array for letter, array in zip("qkv", (q, k, v), strict=True)}
    return Whole(f"self_attention.linear_qkv.{kind}", "", np.concatenate(blocks), names)


def _fc1(fresh: _Numbers, _: ModelDims, stem: str, kind: str) -> Whole:
    gate, up = fresh(FFN, HIDDEN), fresh(FFN, HIDDEN)
    return Whole(
        f"mlp.linear_fc1.{kind}",
        "",
        np.concatenate([gate, up]),
        {f"{stem}mlp.gate_proj.{kind}": gate, f"{stem}mlp.up_proj.{kind}": up},
    )


def _expert(fresh: _Numbers, dims: ModelDims, stem: str, kind: str) -> Whole:
    gate, up = fresh(FFN, HIDDEN), fresh(FFN, HIDDEN)
    if dims.model_type == "mixtral":
        names = ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3")
    else:
        names = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
    parts = {f"{stem}{name}.{kind}": array for name, array in zip(names, (gate, up), strict=True)}
    return Whole("mlp.experts.experts.", f"linear_fc1.{kind}", np.concatenate([gate, up]), parts)


def _expert_down(fresh: _Numbers, dims: ModelDims, stem: str, kind: str) -> Whole:
    down = fresh(HIDDEN, FFN)
    mixtral = dims.model_type == "mixtral"
    name = "block_sparse_moe.experts.{expert}.w2" if mixtral else "mlp.experts.{expert}.down_proj"
    return Whole("mlp.experts.experts.", f"linear_fc2.{kind}", down, {f"{stem}{name}.{kind}": down})


def _proj(fresh: _Numbers, dims: ModelDims, stem: str, kind: str) -> Whole:
    array = fresh(HIDDEN, dims.heads * HEAD)
    return Whole(f"self_attention.linear_proj.{kind}", "", array, {f"{stem}self_attn.o_proj.{kind}": array})


def _norm(fresh: _Numbers, _: ModelDims, stem: str, kind: str) -> Whole:
    array = fresh(HIDDEN)
    return Whole(f"mlp.linear_fc1.layer_norm_{kind}", "", array, {f"{stem}post_attention_layernorm.{kind}": array})


KINDS: dict[str, Callable[[_Numbers, ModelDims, str, str], Whole]] = {
    "qkv": _qkv,
    "fc1": _fc1,
    "expert": _expert,
    "expert_down": _expert_down,
    "proj": _proj,
    "norm": _norm,
}


@st.composite
def windows(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    """Draw any part of a global tensor."""
    offset, size = [], []
    for length in shape:
        a, b = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        offset.append(a)
        size.append(b - a)
    return Chunk(shape, tuple(offset), tuple(size))


def check(key: str, whole: Array, chunk: Chunk, dims: ModelDims, model: dict[str, Array], padding: set[int]) -> None:
    """Compare a part's boxes with the part itself: each element once, under its name, and padding never."""
    part = whole[tuple(slice(a, a + n) for a, n in zip(chunk.offset, chunk.shape, strict=True))]
    held = np.full(part.shape, -1)
    boxes = boxes_of(key, chunk, dims)
    assert boxes is not None
    for box in boxes:
        assert 0 not in box.shape
        values = model[box.logical][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]
        assert values.shape == box.shape
        lead = (1,) * (part.ndim - len(box.shape))
        place = tuple(slice(a, a + n) for a, n in zip(box.local_offset, lead + box.shape, strict=True))
        assert (held[place] == -1).all()
        held[place] = values.reshape(lead + box.shape)
    assert np.array_equal(held, np.where(np.isin(part, list(padding)), -1, part))


@given(data=st.data())
def test_any_part_of_a_layers_tensor_holds_what_slicing_says(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from((1, 2, 4)))
    dims = ModelDims(4, groups, HEAD, model_type=data.draw(st.sampled_from(("", "qwen3_moe", "mixtral"))))
    make = KINDS[data.draw(st.sampled_from(sorted(KINDS)))]
    kind = "bias" if make is _qkv and data.draw(st.booleans()) else "weight"
    stacked_layers, stacked_experts = data.draw(st.booleans()), data.draw(st.booleans())
    fresh, model, arrays, example = _Numbers(), {}, {}, None
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            example = make(fresh, dims, f"model.layers.{layer}.", kind)
            arrays[layer, expert] = example.array
            model.update({name.format(expert=expert): array for name, array in example.parts.items()})
            if not example.expert_key:
                break
    assert example is not None
    layer, expert = data.draw(st.integers(0, LAYERS - 1)), data.draw(st.integers(0, EXPERTS - 1))
    experts: Any = range(EXPERTS) if example.expert_key else (0,)
    chosen_layers = range(LAYERS) if stacked_layers else (layer,)
    chosen_experts = experts if stacked_experts and example.expert_key else (expert if example.expert_key else 0,)
    whole = np.stack([np.stack([arrays[one, other] for other in chosen_experts]) for one in chosen_layers])
    if not (stacked_experts and example.expert_key):
        whole = whole[:, 0]
    if not stacked_layers:
        whole = whole[0]
    key = "decoder.layers." + ("" if stacked_layers else f"{layer}.") + example.key
    if example.expert_key:
        key += ("" if stacked_experts else f"{expert}.") + example.expert_key
    check(key, whole, data.draw(windows(whole.shape)), dims, model, set())


@given(data=st.data(), key=st.sampled_from(("embedding.word_embeddings.weight", "output_layer.weight")))
def test_padding_of_the_vocabulary_is_in_no_box(data: st.DataObject, key: str) -> None:
    whole = np.arange(PADDED * HIDDEN).reshape(PADDED, HIDDEN)
    model = {"model.embed_tokens.weight": whole[:VOCAB], "lm_head.weight": whole[:VOCAB]}
    padding = set(whole[VOCAB:].reshape(-1).tolist())
    check(key, whole, data.draw(windows(whole.shape)), ModelDims(4, 2, HEAD, vocab=VOCAB), model, padding)


@given(data=st.data(), half=st.sampled_from("wv"))
def test_gate_and_up_may_have_keys_of_their_own(data: st.DataObject, half: str) -> None:
    whole = np.arange(FFN * HIDDEN).reshape(FFN, HIDDEN)
    model = {f"model.layers.1.mlp.{'gate' if half == 'w' else 'up'}_proj.weight": whole}
    key = f"decoder.layers.1.mlp.linear_fc1.weight_{half}"
    check(key, whole, data.draw(windows(whole.shape)), ModelDims(4, 2, HEAD), model, set())
