"""The usual way, as truth: gather every parameter from all ranks, take it apart as Hugging Face names it, slice.

Works on arrays of numpy, from facts that the ranks' modules state (`models.global_names`); shares no code with the
product.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .models import HEAD_DIM, HEADS, Recipe

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Share:
    """One rank's share of a parameter of the whole model: number `part` of `parts` along `axis` (None: all of it)."""

    whole: str
    axis: int | None
    part: int
    parts: int
    array: Array


def gather(ranks: Iterable[Iterable[Share]]) -> dict[str, list[Array]]:
    """Return the parts of every parameter in order; copies on several ranks have to be equal."""
    parts: dict[str, dict[int, Array]] = {}
    counts: dict[str, int] = {}
    for shares in ranks:
        for share in shares:
            known = parts.setdefault(share.whole, {}).setdefault(share.part, share.array)
            assert np.array_equal(known, share.array), f"copies of {share.whole} differ"
            assert counts.setdefault(share.whole, share.parts) == share.parts
    for whole, count in counts.items():
        assert sorted(parts[whole]) == list(range(count)), f"{whole} is not complete"
    return {whole: [found[part] for part in sorted(found)] for whole, found in parts.items()}


def hugging_face(ranks: Iterable[Iterable[Share]], recipe: Recipe) -> dict[str, Array]:
    """Return the whole model under Hugging Face names."""
    found: dict[str, Array] = {}
    for whole, parts in gather(ranks).items():
        for name, array in _convert(whole, parts, recipe):
            assert name not in found, name
            found[name] = np.ascontiguousarray(array)
    return found


def _convert(whole: str, parts: list[Array], recipe: Recipe) -> Iterator[tuple[str, Array]]:
    if whole == "embedding.word_embeddings.weight":
        yield "model.embed_tokens.weight", np.concatenate(parts)[: recipe.vocab]
    elif whole == "output_layer.weight":
        yield "lm_head.weight", np.concatenate(parts)[: recipe.vocab]
    elif whole == "decoder.final_layernorm.weight":
        yield "model.norm.weight", parts[0]
    else:
        matched = re.fullmatch(r"decoder\.layers\.(\d+)\.(self_attention|mlp)?\.?(.*)", whole)
        assert matched, whole
        stem = f"model.layers.{matched[1]}."
        if matched[2] == "self_attention":
            yield from _attention(f"{stem}self_attn.", stem, matched[3], parts, recipe)
        elif matched[2] == "mlp":
            yield from _mlp(stem, matched[3], parts, recipe)
        else:
            names = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
            name, kind = matched[3].split(".")
            yield f"{stem}{names[name]}.{kind}", parts[0]


def _attention(stem: str, layer: str, name: str, parts: list[Array], recipe: Recipe) -> Iterator[tuple[str, Array]]:
    kind = name.rsplit(".", 1)[1]
    if name == "linear_qkv.layer_norm_weight":
        yield f"{layer}input_layernorm.weight", parts[0]
    elif name.startswith("linear_qkv."):
        full = np.concatenate(parts)
        queries = HEADS // recipe.groups
        grouped = full.reshape(recipe.groups, queries + 2, HEAD_DIM, *full.shape[1:])
        heads = {"q": grouped[:, :queries], "k": grouped[:, queries : queries + 1], "v": grouped[:, queries + 1 :]}
        for letter, array in heads.items():
            yield f"{stem}{letter}_proj.{kind}", array.reshape(-1, *full.shape[1:])
    elif name == "linear_proj.weight":
        yield f"{stem}o_proj.weight", np.concatenate(parts, 1)
    elif name == "linear_proj.bias":
        yield f"{stem}o_proj.bias", parts[0]
    else:
        yield f"{stem}{name[0]}_norm.weight", parts[0]
        assert name in ("q_layernorm.weight", "k_layernorm.weight"), name


def _mlp(stem: str, name: str, parts: list[Array], recipe: Recipe) -> Iterator[tuple[str, Array]]:
    block = f"{stem}block_sparse_moe." if recipe.mixtral else f"{stem}mlp."
    words = ("w1", "w3", "w2") if recipe.mixtral else ("gate_proj", "up_proj", "down_proj")
    if name == "linear_fc1.layer_norm_weight":
        yield f"{stem}post_attention_layernorm.weight", parts[0]
    elif name == "router.weight":
        yield f"{block}gate.weight", parts[0]
    elif name == "shared_experts.gate_weight":
        yield f"{stem}mlp.shared_expert_gate.weight", parts[0]
    elif name.startswith("shared_experts."):
        yield from _matrices(f"{stem}mlp.shared_expert.", name.removeprefix("shared_experts."), parts, words)
    elif matched := re.fullmatch(r"experts\.local_experts\.(\d+)\.(.*)", name):
        yield from _matrices(f"{block}experts.{matched[1]}.", matched[2], parts, words)
    elif matched := re.fullmatch(r"experts\.(weight[12])\.(\d+)", name):
        each = recipe.experts // recipe.ep
        for local in range(each):
            expert = f"{block}experts.{int(matched[2]) * each + local}."
            mine = [_of_expert(part, each, local, matched[1]) for part in parts]
            yield from _matrices(expert, f"linear_fc{matched[1][-1]}.weight", mine, words)
    else:
        yield from _matrices(f"{stem}mlp.", name, parts, ("gate_proj", "up_proj", "down_proj"))


def _of_expert(part: Array, experts: int, local: int, name: str) -> Array:
    """Return one expert's transposed matrix from a parameter of grouped experts."""
    hidden = part.shape[0] if name == "weight1" else part.shape[1]
    shape = (experts, hidden, -1) if name == "weight1" else (experts, -1, hidden)
    return part.reshape(shape)[local].T


def _matrices(stem: str, name: str, parts: list[Array], words: tuple[str, str, str]) -> Iterator[tuple[str, Array]]:
    linear, kind = name.split(".")
    if linear == "linear_fc1":
        halves = [np.split(part, 2) for part in parts]
        for number in (0, 1):
            yield f"{stem}{words[number]}.{kind}", np.concatenate([half[number] for half in halves])
    elif kind == "bias":
        yield f"{stem}{words[2]}.bias", parts[0]
    else:
        assert linear == "linear_fc2", name
        yield f"{stem}{words[2]}.weight", np.concatenate(parts, 1)
