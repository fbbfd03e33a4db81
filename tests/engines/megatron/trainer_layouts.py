"""What the ranks of a Megatron trainer hold, as boxes, from a model's sizes alone: no Megatron, no torch, no memory.

Compared with real Megatron in test_layouts.py; for shapes of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub_core.layout.canonical import SEGMENT_BYTES, build_layout
from tensorhub_core.layout.types import Box, Layout, TensorSpec
from tensorhub_megatron.names import Chunk, ModelDims, boxes_of

from .engine_layouts import ModelShape, Shape


@dataclass(frozen=True)
class Grid:
    """How Megatron divides a model; experts over `ep` ranks, each of their matrices over `etp`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this times `tp`."""
    fused_norms: bool = True
    grouped_experts: bool = True
    """One parameter for each expert in one module, as with Transformer Engine; else a module each."""

    @property
    def world(self) -> int:
        """Return how many ranks there are."""
        return self.tp * self.pp * self.dp


def trainer_layouts(model: ModelShape, grid: Grid, segment_bytes: int = SEGMENT_BYTES) -> list[Layout]:
    """Return the layouts of all ranks, in Megatron's usual order of ranks."""
    return [_Rank(model, grid, rank).layout(segment_bytes) for rank in range(grid.world)]


class _Rank:
    def __init__(self, model: ModelShape, grid: Grid, rank: int) -> None:
        self._model, self._grid, self._rank = model, grid, rank
        within, self._stage = rank % (grid.tp * grid.dp), rank // (grid.tp * grid.dp)
        self._tp = (within % grid.tp, grid.tp)
        self._etp = (within % grid.etp, grid.etp)
        self._ep = within // grid.etp % grid.ep
        self._dims = ModelDims(
            heads=model.heads,
            groups=model.kv_heads,
            head_dim=model.head_dim,
            vocab=model.vocab,
            model_type="mixtral" if model.mixtral_names else "",
        )

    def layout(self, segment_bytes: int) -> Layout:
        """Return what this rank holds."""
        specs = [spec for spec in self._tensors() if spec.boxes]
        tied = [spec.name.partition("@")[0] for spec in specs if "@" in spec.name]
        pairs = [(name, f"{name}@lm_head.weight") for name in tied]
        return build_layout(specs, pairs, shard=self._rank, num_shards=self._grid.world, segment_bytes=segment_bytes)

    def _tensors(self) -> Iterator[TensorSpec]:
        model, stages = self._model, self._grid.pp
        multiple = self._grid.vocab_multiple * self._grid.tp
        vocabulary = (-(-model.vocab // multiple) * multiple, model.hidden)
        embedding = "embedding.word_embeddings.weight"
        is_last = self._stage == stages - 1
        if self._stage == 0:
            yield from self._word_vectors(embedding, embedding, vocabulary)
        per_stage = model.layers // stages
        for local in range(per_stage):
            yield from self._layer(local, self._stage * per_stage + local)
        if is_last:
            yield self._tensor("decoder.final_layernorm.weight", "decoder.final_layernorm.weight", (model.hidden,))
        if is_last and not (model.tied and stages == 1):
            yield from self._word_vectors("output_layer.weight", embedding if model.tied else "", vocabulary)

    def _word_vectors(self, name: str, key: str, shape: Shape) -> Iterator[TensorSpec]:
        spec = self._tensor(name, key or name, shape, 0)
        yield spec
        if self._model.tied:
            boxes = tuple(Box("lm_head.weight", box.offset, box.shape, box.local_offset) for box in spec.boxes or ())
            yield TensorSpec(f"{name}@lm_head.weight", spec.dtype, spec.shape, boxes)

    def _layer(self, local: int, layer: int) -> Iterator[TensorSpec]:
        model, hidden = self._model, self._model.hidden
        has_experts = model.has_experts(layer)
        fused = self._grid.fused_norms
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        shapes: dict[str, tuple[Shape, int | None]] = {
            norms[0] if fused else "input_layernorm.weight": ((hidden,), None),
            norms[1] if fused and not has_experts else "pre_mlp_layernorm.weight": ((hidden,), None),
            "self_attention.linear_qkv.weight": ((rows, hidden), 0),
            "self_attention.linear_proj.weight": ((hidden, model.heads * model.head_dim), 1),
        }
        if model.qkv_bias:
            shapes["self_attention.linear_qkv.bias"] = ((rows,), 0)
        if model.biases:
            shapes["self_attention.linear_proj.bias"] = ((hidden,), None)
        if model.qk_norm:
            shapes |= {f"self_attention.{letter}_layernorm.weight": ((model.head_dim,), None) for letter in "qk"}
        if has_experts:
            shapes["mlp.router.weight"] = ((model.experts, hidden), None)
            if model.shared_ffn:
                shapes |= _mlp("mlp.shared_experts.", hidden, model.shared_ffn)
                shapes["mlp.shared_experts.gate_weight"] = ((1, hidden), None)
        else:
            shapes |= _mlp("mlp.", hidden, model.ffn)
            if model.biases:
                shapes |= {"mlp.linear_fc1.bias": ((2 * model.ffn,), 0), "mlp.linear_fc2.bias": ((hidden,), None)}
        for name, (shape, axis) in shapes.items():
            yield self._tensor(f"decoder.layers.{local}.{name}", f"decoder.layers.{layer}.{name}", shape, axis)
        if has_experts:
            yield from self._experts(local, layer)

    def _experts(self, local: int, layer: int) -> Iterator[TensorSpec]:
        each = self._model.experts // self._grid.ep
        stem = f"decoder.layers.{local}.mlp.experts."
        for number in range(each):
            key = f"decoder.layers.{layer}.mlp.experts.experts.{self._ep * each + number}."
            for name, (shape, axis) in _mlp("", self._model.hidden, self._model.expert_ffn).items():
                here = f"{name}{number}" if self._grid.grouped_experts else f"local_experts.{number}.{name}"
                yield self._tensor(stem + here, key + name, shape, axis, self._etp)

    def _tensor(
        self, name: str, key: str, shape: Shape, axis: int | None = None, part: tuple[int, int] | None = None
    ) -> TensorSpec:
        """Describe one rank's part; gate and up are divided each for itself."""
        number, parts = (0, 1) if axis is None else part or self._tp
        halves = 2 if "linear_fc1." in key and "layer_norm" not in key else 1
        boxes: list[Box] = []
        local = list(shape)
        if axis is not None:
            local[axis] //= parts
        for half in range(halves):
            offset, piece = [0] * len(shape), list(local)
            if axis is not None:
                piece[axis] //= halves
                offset[axis] = (half * parts + number) * piece[axis]
            for box in boxes_of(key, Chunk(shape, tuple(offset), tuple(piece)), self._dims) or ():
                at = (box.local_offset[0] + half * piece[0], *box.local_offset[1:])
                boxes.append(Box(box.logical, box.offset, box.shape, at))
        return TensorSpec(name, self._model.dtype, tuple(local), tuple(boxes))


def _mlp(stem: str, hidden: int, ffn: int) -> dict[str, tuple[Shape, int | None]]:
    return {f"{stem}linear_fc1.weight": ((2 * ffn, hidden), 0), f"{stem}linear_fc2.weight": ((hidden, ffn), 1)}
