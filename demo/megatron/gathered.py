"""The usual export, as truth: collect all ranks' parameters, join them, take them apart as Hugging Face names them.

Shares no code with TensorHub: plain slicing of whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def read_ranks(folder: Path) -> list[dict[str, Array]]:
    """Read what each rank wrote (`Training.save`)."""
    from safetensors.numpy import load_file

    return [load_file(file) for file in sorted(folder.glob("rank-*.safetensors"))]


def read_checkpoint(folder: Path) -> dict[str, Array]:
    """Read all tensors of a Hugging Face checkpoint."""
    from safetensors.numpy import load_file

    found: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def join(ranks: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return whole parameters by Megatron's names; raises ValueError if copies of a part on several ranks differ.

    Ranks name a part `NAME AXIS PART`, axis -1 for what is not divided.
    """
    parts: dict[str, dict[int, Array]] = {}
    axes: dict[str, int] = {}
    for rank in ranks:
        for key, array in rank.items():
            name, axis, part = key.split(" ")
            axes[name] = int(axis)
            if not np.array_equal(parts.setdefault(name, {}).setdefault(int(part), array), array):
                raise ValueError(f"copies of {name} differ between ranks")
    found = {}
    for name, mine in parts.items():
        arrays = [mine[part] for part in sorted(mine)]
        if name.endswith("linear_fc1.weight"):  # each part holds its rows of gate, then those of up
            found[name] = np.concatenate([half for place in (0, 1) for half in (np.split(a, 2)[place] for a in arrays)])
        else:
            found[name] = arrays[0] if axes[name] < 0 else np.concatenate(arrays, axes[name])
    return found


def hugging_face(whole: Mapping[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """Return whole Megatron parameters as the tensors of a Qwen3 checkpoint; raises ValueError for one not known."""
    return dict(pair for name, array in whole.items() for pair in _convert(name, array, config))


def _convert(name: str, array: Array, config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        kind = "model.embed_tokens" if name.startswith("embedding") else "lm_head"
        yield f"{kind}.weight", array[: config["vocab_size"]]  # without the rows of padding
    elif name == "decoder.final_layernorm.weight":
        yield "model.norm.weight", array
    elif name.startswith("decoder.layers."):
        number, part = name.removeprefix("decoder.layers.").split(".", 1)
        for suffix, piece in _layer(part, array, config):
            yield f"model.layers.{number}.{suffix}.weight", piece
    else:
        raise ValueError(f"{name} is no parameter of the demo's model")


_SAME = {
    "input_layernorm.weight": "input_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "self_attention.linear_proj.weight": "self_attn.o_proj",
    "self_attention.q_layernorm.weight": "self_attn.q_norm",
    "self_attention.k_layernorm.weight": "self_attn.k_norm",
    "mlp.linear_fc2.weight": "mlp.down_proj",
}


def _layer(part: str, array: Array, config: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    if part in _SAME:
        yield _SAME[part], array
    elif part == "mlp.linear_fc1.weight":
        yield from zip(("mlp.gate_proj", "mlp.up_proj"), np.split(array, 2), strict=True)
    elif part == "self_attention.linear_qkv.weight":
        # Group by group: the rows of its queries, of its key, of its value.
        groups, dim = config["num_key_value_heads"], config["head_dim"]
        queries = config["num_attention_heads"] // groups
        rows = array.reshape(groups, queries + 2, dim, -1)
        for letter, heads in (("q", slice(0, queries)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
            yield f"self_attn.{letter}_proj", rows[:, heads].reshape(-1, rows.shape[-1])
    else:
        raise ValueError(f"{part} is no parameter of the demo's model")
