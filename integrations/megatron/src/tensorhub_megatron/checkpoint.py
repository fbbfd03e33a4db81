"""Publish the weights in a folder that Megatron saved, straight from disk, under their Hugging Face names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorhub_core import Worker, connect
from tensorhub_core.checkpoint.dcp import Piece, checkpoint_of, open_pieces, read_index
from tensorhub_core.checkpoint.dcp_index import StoredTensor
from tensorhub_core.checkpoint.files import Checkpoint
from tensorhub_core.checkpoint.formats import TORCH_DIST, OpenOptions, detect, open_folder
from tensorhub_core.client.tensors import RawTensor
from tensorhub_core.errors import ConfigError, LayoutMismatch, RegistrationError
from tensorhub_core.layout.types import Box
from tensorhub_megatron.hf_config import (
    REARRANGING,
    TrainerFacts,
    differences,
    dims_of,
    read_hf_config,
    rearranged,
    surplus,
)
from tensorhub_megatron.names import EMBEDDING, LM_HEAD, OUTPUT_LAYER, Chunk, ModelDims, boxes_of, parse_key
from tensorhub_megatron.saved_settings import saved_settings

if TYPE_CHECKING:
    from tensorhub_core.settings import Settings

_NOT_WEIGHTS = re.compile(
    r"(?:chained_\d+\.)?optim(?:izer)?s?\..*|(?:opt_param_scheduler|rng_state|rerun_state_machine).*|.*\._extra_state.*"
)
_SETTINGS = (
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "rotary_interleaved",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    *REARRANGING,
)
"""What tensors' shapes do not tell, and settings do where they were saved."""
_LAYER = "decoder.layers.{layer}."
_EXPERT = f"{_LAYER}mlp.experts.{{expert}}."


def publish_from_checkpoint(
    folder: str | os.PathLike[str],
    *,
    hf_config: Any = None,
    server: str | Sequence[str] | None = None,
    model: str = "policy",
    version: int = 0,
    stream: str | None = None,
    replica: str | None = None,
    extra_names: Mapping[str, str | None] | None = None,
    copy: bool = False,
    transport: str = "auto",
    settings: Mapping[str, object] | Settings | None = None,
) -> Worker:
    """Publish the weights in a checkpoint folder as `version`, and return the worker that serves them until closed.

    `folder`: a Megatron `torch_dist` folder (`iter_0000100`, or the one above, for its newest iteration), or one of
    `torch.distributed.checkpoint` or safetensors. Its files are mapped, not copied: leave them alone until the worker
    is closed, or give `copy=True`. One process does it, without torch or Megatron; whatever the parallel
    sizes were, engines read what they need. `hf_config` (a transformers config, a mapping, a folder or `config.json`)
    is needed for `torch_dist`, unless a `config.json` lies beside it, and compared with what was saved: shapes, and
    what Megatron's `common.pt` or Megatron-Bridge's `run_config.yaml` say, such as norms that were saved smaller by one
    (`--apply-layernorm-1p`). A folder without them must not hold such a model.
    `extra_names` is `describe`'s. Raises ConfigError if the folder cannot be served, LayoutMismatch listing everything
    in which it is not the model of `hf_config`, RegistrationError naming tensors without a known name, and what
    `connect` and `publish` raise.
    """
    where, kind = detect(folder)
    options = OpenOptions(names=extra_names, hf_config=hf_config, copy=copy)
    if kind == TORCH_DIST:
        checkpoint = open_torch_dist(where, options)
    else:  # named by its tensors themselves
        checkpoint = open_folder(where, replace(options, hf_config=None), kind)
    worker = connect(server, model=model, replica=replica, stream=stream, transport=transport, settings=settings)
    try:
        worker.register(((tensor.name, tensor) for tensor in checkpoint.tensors), checkpoint.boxes)
        worker.publish(version)
    except BaseException:
        worker.close()
        raise
    return worker


def open_torch_dist(folder: Path, options: OpenOptions) -> Checkpoint:
    """Open a Megatron `torch_dist` folder; the entry point `torch_dist` of `tensorhub.checkpoints`.

    `options.hf_config` None: `config.json` in the folder, or in that of all iterations. `options.names` maps keys as
    `describe(extra_names=...)` does. Raises ConfigError, LayoutMismatch and RegistrationError as
    `publish_from_checkpoint` does.
    """
    if options.prefix is not None:
        raise ConfigError("a folder of torch_dist takes no prefix: its keys are known; give other names instead")
    config = read_hf_config(_config_beside(folder) if options.hf_config is None else options.hf_config)
    index = read_index(folder)
    weights = [tensor for tensor in index.tensors if not _NOT_WEIGHTS.fullmatch(tensor.key)]
    dims = dims_of(config)
    said = saved_settings(folder, _SETTINGS)
    different = differences(config, saved_facts(weights, dims, str(folder), said)) + rearranged(said)
    if different:
        text = f"{folder} does not hold the model of hf_config: " + "; ".join(different)
        raise LayoutMismatch(text, tuple(different))
    served = _served(weights, dims, options.names, str(folder))
    pieces = open_pieces(folder, served, options.copy, options.progress)
    tied = all(tensor.key != OUTPUT_LAYER for tensor in weights)
    tensors: list[RawTensor] = []
    boxes: dict[str, tuple[Box, ...]] = {}
    for name, piece, places in _placed(pieces, dims, options.names, tied):
        tensors.append(RawTensor(name, piece.tensor.dtype, piece.chunk.shape, piece.data))
        boxes[name] = places
    lost = surplus(config, (box.logical for places in boxes.values() for box in places))
    if lost:
        raise LayoutMismatch(f"{folder} does not hold the model of hf_config: " + "; ".join(lost), tuple(lost))
    left_out = index.num_others + len(index.tensors) - len(served)
    return checkpoint_of(folder, pieces, tensors, boxes, left_out)


def _config_beside(folder: Path) -> Path:
    """Return the `config.json` in the folder of an iteration, or in the one that holds all of them."""
    for place in (folder, folder.parent) if folder.name.startswith(("iter_", "release")) else (folder,):
        if os.path.isfile(place / "config.json"):
            return place / "config.json"
    raise ConfigError(
        f"{folder} says nothing about heads and the vocabulary: give hf_config (--hf-config), the Hugging Face "
        "folder or config.json of the model, or put a config.json into it"
    )


def _served(
    weights: Sequence[StoredTensor], dims: ModelDims, names: Mapping[str, str | None] | None, where: str
) -> list[StoredTensor]:
    """Return the tensors that have names and are not left out; raises RegistrationError listing all faults."""
    faults: dict[str, None] = {}
    served = []
    unused = set(names or {}) - {parse_key(tensor.key).template for tensor in weights}
    if unused:
        raise ConfigError(f"{where} has no tensors of the keys that names are given for: {', '.join(sorted(unused))}")
    for tensor in weights:
        template = parse_key(tensor.key).template
        if names is not None and template in names and names[template] is None:
            continue
        whole = Chunk(tensor.shape, (0,) * len(tensor.shape), tuple(min(1, length) for length in tensor.shape))
        try:
            if boxes_of(tensor.key, whole, dims, names) is not None:
                served.append(tensor)
                continue
            fault = (
                f"{template}: has no known Hugging Face name; give names (--names, extra_names) with "
                f"{{{template!r}: name}}, or None to leave it out"
            )
        except RegistrationError as error:
            fault = str(error)
        faults[fault] = None
    if faults:
        raise RegistrationError("\n- ".join((f"{where} cannot be published as it is:", *faults)))
    return served


def _placed(
    pieces: Iterable[Piece], dims: ModelDims, names: Mapping[str, str | None] | None, tied: bool
) -> Iterator[tuple[str, Piece, tuple[Box, ...]]]:
    """Yield every piece with its name and its boxes; the embedding twice where the output layer uses it, too."""
    for piece in pieces:
        chunk = Chunk(piece.tensor.shape, piece.chunk.offset, piece.chunk.shape)
        boxes = boxes_of(piece.tensor.key, chunk, dims, names)
        if not boxes:  # nothing but padding
            continue
        yield piece.name, piece, boxes
        if tied and piece.tensor.key == EMBEDDING:  # engines that do not tie them ask for both
            head = tuple(Box(LM_HEAD, box.offset, box.shape, box.local_offset) for box in boxes)
            yield f"{piece.name}@{LM_HEAD}", piece, head


def saved_facts(
    weights: Sequence[StoredTensor], dims: ModelDims, where: str, said: Mapping[str, Any] | None = None
) -> TrainerFacts:
    """Return what the shapes and keys of a folder, and settings beside them, say about its model.

    What none of them says is taken from `dims`.
    """
    said = said or {}
    heads, groups = said.get("num_attention_heads"), said.get("num_query_groups")
    if said.get("group_query_attention") is False or not groups:  # the number is 1 then
        groups = heads
    shapes: dict[str, tuple[int, ...]] = {}
    layers = experts = 0
    for tensor in weights:
        key = parse_key(tensor.key)
        shapes[key.template] = tensor.shape[key.axes :]
        stacked = list(tensor.shape[: key.axes])
        if key.template.startswith(_LAYER):
            layers = max(layers, stacked.pop(0) if key.layer is None and stacked else (key.layer or 0) + 1)
        if key.template.startswith(_EXPERT):
            experts = max(experts, stacked.pop(0) if key.expert is None and stacked else (key.expert or 0) + 1)
    if len(shapes.get(EMBEDDING, ())) != 2:
        raise ConfigError(f"{where} does not hold a language model: it has no {EMBEDDING}")
    return TrainerFacts(
        layers=layers,
        hidden=shapes[EMBEDDING][1],
        heads=heads or dims.heads,
        groups=groups or dims.groups,
        head_dim=said.get("kv_channels") or dims.head_dim,
        ffn=_ffn(shapes, f"{_LAYER}mlp."),
        experts=experts or None,
        expert_ffn=_ffn(shapes, _EXPERT),
        shared_ffn=_ffn(shapes, f"{_LAYER}mlp.shared_experts."),
        tied=OUTPUT_LAYER not in shapes,
        qkv_bias=f"{_LAYER}self_attention.linear_qkv.bias" in shapes,
        qk_norm=f"{_LAYER}self_attention.q_layernorm.weight" in shapes,
        zero_centered_norms=said.get("apply_layernorm_1p", said.get("layernorm_zero_centered_gamma")),
        interleaved_rotary=bool(said.get("rotary_interleaved")),
    )


def _ffn(shapes: Mapping[str, tuple[int, ...]], block: str) -> int | None:
    """Return the width of an MLP whose first matrix is gate and up, one below the other, or two."""
    both, gate = shapes.get(f"{block}linear_fc1.weight"), shapes.get(f"{block}linear_fc1.weight_w")
    return gate[0] if gate else both[0] // 2 if both else None
