"""Describe the live parameters of a Megatron model as boxes of Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tensorhub_core.errors import RegistrationError
from tensorhub_core.layout.types import Box
from tensorhub_megatron import compat
from tensorhub_megatron.hf_config import REARRANGING, differences, read_hf_config, rearranged, surplus, value_of
from tensorhub_megatron.modules import require_no_adapters
from tensorhub_megatron.names import EMBEDDING, LM_HEAD, OUTPUT_LAYER, ModelDims, boxes_of, parse_key

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Described:
    """What one rank registers: `worker.register(described.tensors, described.boxes)`.

    `tensors` are the model's own parameters by physical name, or views of them, never copies; `boxes` say which regions
    of Hugging Face tensors they hold. `parameters` has the parameter behind each of them, `addresses` where it lay.
    Names are unique on a rank and the same at every call.
    """

    tensors: dict[str, torch.Tensor]
    boxes: dict[str, tuple[Box, ...]]
    parameters: dict[str, torch.Tensor]
    addresses: dict[str, int]

    def moved(self) -> list[str]:
        """Return the names whose parameter has other memory now than the one that was described."""
        return [name for name, address in self.addresses.items() if self.parameters[name].data_ptr() != address]


def describe(
    model_chunks: Any, hf_config: Any = None, *, extra_names: Mapping[str, str | None] | None = None
) -> Described:
    """Describe the parameters of one rank as boxes in the coordinates of Hugging Face tensors; nothing is copied.

    `model_chunks`: the model or list of models that `get_model()` made, wrapped or not; call it after
    DistributedDataParallel and the optimizer are there, on every rank. `hf_config`: the transformers config, a
    mapping, or a folder with `config.json`: tells names and the vocabulary's true size, and is compared with the
    trainer's configuration. Without it names are those of Llama and Qwen, and the padding of the vocabulary is
    published as words unless the trainer's configuration states `vocab_size`. `extra_names` maps Megatron keys
    that are not known (the error names them) to Hugging Face names, or to None to leave a tensor out. Raises
    RegistrationError naming all parameters that cannot be described, or all differences between the configurations.
    """
    chunks = model_chunks if isinstance(model_chunks, Sequence) else [model_chunks]
    models = [compat.unwrap(chunk) for chunk in chunks]
    for model in models:
        require_no_adapters(model)
    own, config = models[0].config, read_hf_config(hf_config)
    vocab = value_of(config, "vocab_size") or getattr(own, "vocab_size", None)
    dims = compat.model_dims(own, vocab, str(config.get("model_type") or ""))
    faults = differences(config, compat.facts_of(own, tied=any(map(compat.is_tied, models))))
    faults += rearranged({name: getattr(own, name, None) for name in REARRANGING})
    found = Described({}, {}, {}, {})
    unknown: dict[str, None] = {}
    for number, model in enumerate(models):
        prefix = f"chunk{number}." if len(models) > 1 else ""
        here = compat.entries(model)
        faults += _lost(compat.lost(model, here), extra_names or {})
        for entry in here:
            entry = replace(entry, name=prefix + entry.name)
            try:
                boxes, templates = _boxes(entry, dims, extra_names)
            except RegistrationError as error:
                faults.append(str(error))
                continue
            unknown.update(dict.fromkeys(templates))
            _add(found, entry, boxes, compat.is_tied(model))
    faults += surplus(config, (box.logical for boxes in found.boxes.values() for box in boxes))
    faults += [
        f"{template}: has no known Hugging Face name; give extra_names={{{template!r}: name}}, or None to leave it out"
        for template in unknown
    ]
    if faults:
        raise RegistrationError("\n- ".join(("the Megatron model cannot be published as it is:", *faults)))
    return found


def _lost(names: Sequence[str], extra_names: Mapping[str, str | None]) -> list[str]:
    """Return a fault for each parameter that Megatron does not place, unless the user leaves it out."""
    templates = dict.fromkeys(parse_key(name).template for name in names)
    return [
        f"{template}: Megatron's sharded_state_dict() does not say where it lies; give extra_names={{{template!r}: "
        "None} to leave it out"
        for template in templates
        if template not in extra_names or extra_names[template] is not None
    ]


def _boxes(
    entry: compat.Entry, dims: ModelDims, extra_names: Mapping[str, str | None] | None
) -> tuple[list[Box], list[str]]:
    """Return what a parameter holds, and the templates of keys that are not known."""
    boxes: list[Box] = []
    unknown: list[str] = []
    for place in entry.places:
        part = boxes_of(place.key, place.chunk, dims, extra_names)
        if part is None:
            unknown.append(parse_key(place.key).template)
        boxes.extend(_localised(box, place) for box in part or ())
    return boxes, unknown


def _add(found: Described, entry: compat.Entry, boxes: Sequence[Box], tied: bool) -> None:
    if not boxes:  # nothing but padding, or left out
        return
    _put(found, entry.name, entry, boxes)
    if tied and entry.places[0].key in (EMBEDDING, OUTPUT_LAYER):
        # Engines that do not tie them ask for both.
        _put(found, f"{entry.name}@{LM_HEAD}", entry, [_renamed(box) for box in boxes])


def _put(found: Described, name: str, entry: compat.Entry, boxes: Sequence[Box]) -> None:
    found.tensors[name] = entry.tensor
    found.parameters[name] = entry.parameter
    found.addresses[name] = entry.parameter.data_ptr()
    found.boxes[name] = tuple(boxes)


def _localised(box: Box, place: compat.Place) -> Box:
    """Move a box from the axes of its chunk to those of the local tensor."""
    own = box.local_offset[place.prepended :]
    return Box(box.logical, box.offset, box.shape, tuple(a + b for a, b in zip(own, place.local, strict=True)))


def _renamed(box: Box) -> Box:
    return Box(LM_HEAD, box.offset, box.shape, box.local_offset)
