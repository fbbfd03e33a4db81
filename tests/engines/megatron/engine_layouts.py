"""What an inference engine's ranks hold, as boxes, from a model's sizes alone: fused and sharded as vLLM does it.

No torch and no memory, so that it serves for shapes of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub_core.layout.canonical import build_layout
from tensorhub_core.layout.types import Box, Layout, TensorSpec

VOCAB_MULTIPLE = 64
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with Llama's, Qwen's or Mixtral's names; `experts = 0` is dense."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int = 0
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()
    tied: bool = False
    qkv_bias: bool = False
    biases: bool = False
    """Of the other linear layers."""
    qk_norm: bool = False
    mixtral_names: bool = False
    dtype: str = "bfloat16"

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer's MLP is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def expert_names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """Return the names of an expert's gate, up and down matrices."""
        if self.mixtral_names:
            stem = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            return f"{stem}w1.weight", f"{stem}w3.weight", f"{stem}w2.weight"
        return _mlp_names(f"model.layers.{layer}.mlp.experts.{expert}.")

    def router_name(self, layer: int) -> str:
        """Return the name of a router's matrix."""
        return f"model.layers.{layer}.{'block_sparse_moe' if self.mixtral_names else 'mlp'}.gate.weight"


def _mlp_names(stem: str) -> tuple[str, str, str]:
    return f"{stem}gate_proj.weight", f"{stem}up_proj.weight", f"{stem}down_proj.weight"


def logical_shapes(model: ModelShape) -> dict[str, Shape]:
    """Return the Hugging Face tensors of a model."""
    hidden = model.hidden
    found: dict[str, Shape] = {"model.embed_tokens.weight": (model.vocab, hidden), "model.norm.weight": (hidden,)}
    if not model.tied:
        found["lm_head.weight"] = (model.vocab, hidden)
    for layer in range(model.layers):
        found.update(_layer_shapes(model, layer))
    return found


def _layer_shapes(model: ModelShape, layer: int) -> Iterator[tuple[str, Shape]]:
    stem, hidden = f"model.layers.{layer}.", model.hidden
    rows = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{stem}{name}.weight", (hidden,)
    for name, heads in rows.items():
        yield f"{stem}self_attn.{name}_proj.weight", (heads * model.head_dim, hidden)
        if model.qkv_bias:
            yield f"{stem}self_attn.{name}_proj.bias", (heads * model.head_dim,)
    yield f"{stem}self_attn.o_proj.weight", (hidden, model.heads * model.head_dim)
    if model.biases:
        yield f"{stem}self_attn.o_proj.bias", (hidden,)
    if model.qk_norm:
        yield f"{stem}self_attn.q_norm.weight", (model.head_dim,)
        yield f"{stem}self_attn.k_norm.weight", (model.head_dim,)
    if not model.has_experts(layer):
        for name, shape in zip(_mlp_names(f"{stem}mlp."), _mlp_shapes(hidden, model.ffn), strict=True):
            yield name, shape
            if model.biases:
                yield f"{name.removesuffix('weight')}bias", shape[:1]
        return
    yield model.router_name(layer), (model.experts, hidden)
    for expert in range(model.experts):
        yield from zip(model.expert_names(layer, expert), _mlp_shapes(hidden, model.expert_ffn), strict=True)
    if model.shared_ffn:
        shared = _mlp_names(f"{stem}mlp.shared_expert.")
        yield from zip(shared, _mlp_shapes(hidden, model.shared_ffn), strict=True)
        yield f"{stem}mlp.shared_expert_gate.weight", (1, hidden)


def _mlp_shapes(hidden: int, ffn: int) -> tuple[Shape, Shape, Shape]:
    return (ffn, hidden), (ffn, hidden), (hidden, ffn)


def engine_layout(model: ModelShape, tp: int, rank: int, *, expert_parallel: bool = False) -> Layout:
    """Return what one of `tp` ranks holds: fused qkv and gate_up, stacked experts, the vocabulary padded.

    With `expert_parallel` each rank holds whole experts, an equal share of them.
    """
    specs = list(_Rank(model, tp, rank, expert_parallel).tensors())
    return build_layout(specs, shard=rank, num_shards=tp)


@dataclass(frozen=True)
class _Rank:
    model: ModelShape
    tp: int
    rank: int
    expert_parallel: bool

    def tensors(self) -> Iterator[TensorSpec]:
        model = self.model
        vocabulary = ("model.embed_tokens.weight", *(() if model.tied else ("lm_head.weight",)))
        for name in vocabulary:
            yield self._vocabulary(name)
        yield self._whole("model.norm.weight", (model.hidden,))
        for layer in range(model.layers):
            yield from self._layer(layer)

    def _layer(self, layer: int) -> Iterator[TensorSpec]:
        model, stem = self.model, f"model.layers.{layer}."
        hidden = model.hidden
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield self._whole(f"{stem}{name}.weight", (hidden,))
        if model.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield self._whole(f"{stem}self_attn.{name}.weight", (model.head_dim,))
        yield self._qkv(f"{stem}self_attn.", "weight", (hidden,))
        if model.qkv_bias:
            yield self._qkv(f"{stem}self_attn.", "bias", ())
        yield self._columns(f"{stem}self_attn.o_proj.weight", hidden, model.heads * model.head_dim)
        if model.biases:
            yield self._whole(f"{stem}self_attn.o_proj.bias", (hidden,))
        if model.has_experts(layer):
            yield from self._experts(layer)
        else:
            yield from self._mlp(f"{stem}mlp.", model.ffn)
            if model.biases:
                yield self._gate_up(f"{stem}mlp.", model.ffn, "bias", ())
                yield self._whole(f"{stem}mlp.down_proj.bias", (hidden,))

    def _mlp(self, stem: str, ffn: int) -> Iterator[TensorSpec]:
        yield self._gate_up(stem, ffn, "weight", (self.model.hidden,))
        yield self._columns(f"{stem}down_proj.weight", self.model.hidden, ffn)

    def _experts(self, layer: int) -> Iterator[TensorSpec]:
        model, hidden = self.model, self.model.hidden
        yield self._whole(model.router_name(layer), (model.experts, hidden))
        if self.expert_parallel:
            count, ffn, begin = model.experts // self.tp, model.expert_ffn, 0
            first = self.rank * count
        else:
            count, ffn, first = model.experts, model.expert_ffn // self.tp, 0
            begin = self.rank * ffn
        w13: list[Box] = []
        w2: list[Box] = []
        for local in range(count):
            gate, up, down = model.expert_names(layer, first + local)
            w13 += [
                Box(name, (begin, 0), (ffn, hidden), (local, half * ffn, 0)) for half, name in enumerate((gate, up))
            ]
            w2.append(Box(down, (0, begin), (hidden, ffn), (local, 0, 0)))
        stem = f"model.layers.{layer}.mlp.experts."
        yield TensorSpec(f"{stem}w13_weight", model.dtype, (count, 2 * ffn, hidden), tuple(w13))
        yield TensorSpec(f"{stem}w2_weight", model.dtype, (count, hidden, ffn), tuple(w2))
        if model.shared_ffn:
            shared = f"model.layers.{layer}.mlp.shared_expert"
            yield from self._mlp(f"{shared}.", model.shared_ffn)
            yield self._whole(f"{shared}_gate.weight", (1, hidden))

    def _whole(self, name: str, shape: Shape) -> TensorSpec:
        origin = (0,) * len(shape)
        return TensorSpec(name, self.model.dtype, shape, (Box(name, origin, shape, origin),))

    def _vocabulary(self, name: str) -> TensorSpec:
        vocab, hidden = self.model.vocab, self.model.hidden
        rows = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // self.tp
        begin = self.rank * rows
        held = max(0, min(vocab, begin + rows) - begin)
        boxes = (Box(name, (begin, 0), (held, hidden), (0, 0)),) if held else ()
        return TensorSpec(name, self.model.dtype, (rows, hidden), boxes)

    def _columns(self, name: str, rows: int, columns: int) -> TensorSpec:
        width = columns // self.tp
        box = Box(name, (0, self.rank * width), (rows, width), (0, 0))
        return TensorSpec(name, self.model.dtype, (rows, width), (box,))

    def _gate_up(self, stem: str, ffn: int, kind: str, tail: Shape) -> TensorSpec:
        rows, zeros = ffn // self.tp, (0,) * len(tail)
        boxes = tuple(
            Box(f"{stem}{name}_proj.{kind}", (self.rank * rows, *zeros), (rows, *tail), (half * rows, *zeros))
            for half, name in enumerate(("gate", "up"))
        )
        return TensorSpec(f"{stem}gate_up_proj.{kind}", self.model.dtype, (2 * rows, *tail), boxes)

    def _qkv(self, stem: str, kind: str, tail: Shape) -> TensorSpec:
        """Fuse this rank's heads; key and value heads are on several ranks where there are fewer than ranks."""
        model, zeros = self.model, (0,) * len(tail)
        queries = model.heads // self.tp * model.head_dim
        keys = max(1, model.kv_heads // self.tp) * model.head_dim
        first = self.rank * model.kv_heads // self.tp * model.head_dim
        at = 0
        boxes: list[Box] = []
        for name, begin, rows in (("q", self.rank * queries, queries), ("k", first, keys), ("v", first, keys)):
            boxes.append(Box(f"{stem}{name}_proj.{kind}", (begin, *zeros), (rows, *tail), (at, *zeros)))
            at += rows
        return TensorSpec(f"{stem}qkv_proj.{kind}", model.dtype, (at, *tail), tuple(boxes))
