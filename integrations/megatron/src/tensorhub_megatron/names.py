"""Say which regions of Hugging Face named tensors a part of a Megatron tensor holds. Pure: no torch, no Megatron.

Keys are those of `sharded_state_dict()` and of `torch_dist` folders, coordinates those of Megatron's global tensors.
There, layers and experts are leading axes where the key does not number them. What remains is a list of
rows: every global tensor is a concatenation, along its first other axis, of rows of Hugging Face tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from string import Formatter

from tensorhub_core.errors import RegistrationError
from tensorhub_core.layout.types import Box

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
LM_HEAD = "lm_head.weight"

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"(?:experts\.)?(?:local_experts\.)?(?:(\d+)\.)?(.+)")
_EXPERTS = "mlp.experts."
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_KIND = re.compile(r"(.*[._])(weight|bias)")

_MODEL_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    OUTPUT_LAYER: LM_HEAD,
    "output_layer.bias": "lm_head.bias",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_layernorm.bias": "model.norm.bias",
}
_VOCABULARY = (EMBEDDING, OUTPUT_LAYER, "output_layer.bias")
# Of one layer, without the last word: `weight` or `bias`.
_LAYER_NAMES = {
    "input_layernorm.": "input_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.q_layernorm.": "self_attn.q_norm.",
    "self_attention.k_layernorm.": "self_attn.k_norm.",
    "self_attention.linear_proj.": "self_attn.o_proj.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
}


@dataclass(frozen=True)
class Mlp:
    """Name a block's matrices in Hugging Face: `prefix` + `gate`, `up` or `down` + `.weight`."""

    prefix: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Naming:
    """Name what families of models name differently; `{expert}` stands for the global number of an expert."""

    router: str = "mlp.gate."
    expert: Mlp = Mlp("mlp.experts.{expert}.")
    shared_expert: Mlp = Mlp("mlp.shared_expert.")
    shared_gate: str = "mlp.shared_expert_gate."


_NAMINGS = {
    "mixtral": Naming(
        router="block_sparse_moe.gate.", expert=Mlp("block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2")
    ),
}


@dataclass(frozen=True)
class ModelDims:
    """Describe a model as far as names and boxes depend on it.

    `vocab` is the true size of the vocabulary, without padding; None if it is not known: all rows then count. `gated`
    says that the first matrix of an MLP is two, gate and up. `model_type` is the `model_type` of the Hugging Face
    configuration, "" if it is not known.
    """

    heads: int
    groups: int
    head_dim: int
    vocab: int | None = None
    gated: bool = True
    model_type: str = ""


@dataclass(frozen=True)
class Chunk:
    """Place a part in a global tensor, all of whose axes count: `shape` elements from `offset` on."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Key:
    """A Megatron key, taken apart: None where layer or expert is an axis of the tensor, or where there is none.

    `template` names the same tensor of every layer and expert: `decoder.layers.{layer}.mlp.router.weight`.
    """

    template: str
    layer: int | None
    expert: int | None
    axes: int
    """How many leading axes are layers and experts."""


Part = tuple[str | None, int, int]
"""Rows of a global tensor: the Hugging Face name (None is padding), its first row, how many."""


def parse_key(key: str) -> Key:
    """Take a key of a sharded state dict apart. Any thread."""
    layers = _LAYER.fullmatch(key)
    if layers is None:
        return Key(key, None, None, 0)
    layer, rest = layers.groups()
    axes = int(layer is None)
    expert = None
    if rest.startswith(_EXPERTS):
        matched = _EXPERT.fullmatch(rest.removeprefix(_EXPERTS))
        assert matched is not None
        expert, rest = matched.groups()
        axes += expert is None
        rest = f"{_EXPERTS}{{expert}}.{rest}"
    return Key(
        f"decoder.layers.{{layer}}.{rest}",
        None if layer is None else int(layer),
        None if expert is None else int(expert),
        axes,
    )


def boxes_of(
    key: str, chunk: Chunk, dims: ModelDims, extra_names: Mapping[str, str | None] | None = None
) -> tuple[Box, ...] | None:
    """Return the boxes of a part of the global tensor `key`, or None if nobody knows its Hugging Face name.

    `local_offset` has the axes of the chunk. `extra_names` maps templates (`Key.template`) to Hugging Face names with
    the same `{layer}` and `{expert}`, or to None for a tensor to be left out: its boxes are (). Raises
    RegistrationError if the shape contradicts `dims`. Any thread.
    """
    parsed = parse_key(key)
    rank = len(chunk.global_shape)
    if rank <= parsed.axes:
        raise RegistrationError(f"{key!r} of shape {chunk.global_shape} lacks axes: layers and experts come first")
    rows = chunk.global_shape[parsed.axes]
    if extra_names is not None and parsed.template in extra_names:
        parts: list[Part] | None = _given(parsed.template, extra_names[parsed.template], rows)
    else:
        parts = _parts(parsed.template, rows, dims)
    if parts is None:
        return None
    boxes: list[Box] = []
    for index in product(*map(range, chunk.shape[: parsed.axes])):
        numbers = [at + first for at, first in zip(index, chunk.offset, strict=False)]
        layer = parsed.layer if parsed.layer is not None or not numbers else numbers.pop(0)
        expert = parsed.expert if parsed.expert is not None or not numbers else numbers.pop(0)
        boxes.extend(_boxes(parts, chunk, parsed.axes, index, {"layer": layer, "expert": expert}))
    return tuple(boxes)


def _boxes(
    parts: list[Part], chunk: Chunk, axis: int, index: tuple[int, ...], numbers: Mapping[str, int | None]
) -> Iterator[Box]:
    """Cut the chunk's window out of the rows; the axes after them are the same on both sides."""
    low, high = chunk.offset[axis], chunk.offset[axis] + chunk.shape[axis]
    columns, width = chunk.offset[axis + 1 :], chunk.shape[axis + 1 :]
    begin = 0
    for name, first, count in parts:
        a, b = max(begin, low), min(begin + count, high)
        if name is not None and a < b and 0 not in width:
            local = (*index, a - low, *(0 for _ in width))
            yield Box(name.format(**numbers), (first + a - begin, *columns), (b - a, *width), local)
        begin += count


def _given(template: str, name: str | None, rows: int) -> list[Part]:
    """Return the rows of a tensor that the user named; raises RegistrationError for a name unlike its key."""
    if name is None:
        return []
    wanted = {field for field in ("layer", "expert") if f"{{{field}}}" in template}
    try:
        fields = {field for _, field, _, _ in Formatter().parse(name) if field is not None}
    except ValueError:
        fields = {name}
    if not name or fields != wanted:
        numbers = " and ".join(f"{{{field}}}" for field in sorted(wanted, reverse=True)) or "no number in braces"
        raise RegistrationError(
            f"the name given for {template!r} is {name!r}: it has to have {numbers}, as the key does"
        )
    return [(name, 0, rows)]


def _parts(template: str, rows: int, dims: ModelDims) -> list[Part] | None:
    """Return what the rows of a global tensor are, or None if its name is not known."""
    if template in _MODEL_NAMES:
        name = _MODEL_NAMES[template]
        return _vocabulary(name, rows, dims) if template in _VOCABULARY else [(name, 0, rows)]
    prefix = "decoder.layers.{layer}."
    if not template.startswith(prefix):
        return None
    here = template.removeprefix(prefix)
    halves = _HALF.fullmatch(here)
    kinds = _KIND.fullmatch(here if halves is None else halves[1])
    if kinds is None:
        return None
    stem, kind = kinds.groups()
    naming = _NAMINGS.get(dims.model_type, Naming())
    layer = "model.layers.{layer}."
    whole = {**_LAYER_NAMES, "mlp.router.": naming.router, "mlp.shared_experts.gate_": naming.shared_gate}.get(stem)
    if whole is not None:
        return [(f"{layer}{whole}{kind}", 0, rows)]
    if stem == "self_attention.linear_qkv.":
        return _qkv(f"{layer}self_attn.", kind, rows, dims)
    for block, mlp in (
        ("mlp.", Mlp("mlp.")),
        ("mlp.shared_experts.", naming.shared_expert),
        (f"{_EXPERTS}{{expert}}.", naming.expert),
    ):
        if stem in (f"{block}linear_fc1.", f"{block}linear_fc2."):
            return _mlp(mlp, f"{layer}{mlp.prefix}", stem.endswith("1."), halves and halves[2], kind, rows, dims)
    return None


def _mlp(
    mlp: Mlp, prefix: str, first: bool, half: str | None, kind: str, rows: int, dims: ModelDims
) -> list[Part] | None:
    if not first:
        return [(f"{prefix}{mlp.down}.{kind}", 0, rows)]
    gate, up = f"{prefix}{mlp.gate}.{kind}", f"{prefix}{mlp.up}.{kind}"
    if half is not None:
        return [(gate if half == "w" else up, 0, rows)]
    if not dims.gated:
        return [(up, 0, rows)]
    if rows % 2:
        raise RegistrationError(f"{rows} rows of {prefix}{mlp.gate} and {mlp.up} together cannot be halved")
    return [(gate, 0, rows // 2), (up, 0, rows // 2)]


def _qkv(prefix: str, kind: str, rows: int, dims: ModelDims) -> list[Part]:
    """Take the rows of q, k and v apart: per query group its q heads, then one k and one v head."""
    head, queries = dims.head_dim, dims.heads // dims.groups * dims.head_dim
    expected = (queries + 2 * head) * dims.groups
    if rows != expected:
        raise RegistrationError(
            f"linear_qkv has {rows} rows; {dims.heads} heads of {head} in {dims.groups} query groups take {expected}"
        )
    parts: list[Part] = []
    for group in range(dims.groups):
        parts.append((f"{prefix}q_proj.{kind}", group * queries, queries))
        parts.append((f"{prefix}k_proj.{kind}", group * head, head))
        parts.append((f"{prefix}v_proj.{kind}", group * head, head))
    return parts


def _vocabulary(name: str, rows: int, dims: ModelDims) -> list[Part]:
    vocab = rows if dims.vocab is None else dims.vocab
    if vocab > rows:
        raise RegistrationError(f"the vocabulary has {vocab} words, but the trainer's {name} only {rows} rows")
    return [(name, 0, vocab), (None, 0, rows - vocab)]
