"""Publish a trainer's weights after every optimizer step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from tensorhub_megatron.attaching import attach
    from tensorhub_megatron.bridge import TensorHubCallback
    from tensorhub_megatron.checkpoint import publish_from_checkpoint
    from tensorhub_megatron.fsdp import attach_fsdp
    from tensorhub_megatron.hf_trainer import TensorHubTrainerCallback
    from tensorhub_megatron.layout import Described, describe
    from tensorhub_megatron.publisher import Publisher, attach_optimizer, parameters_of

_PLACES = {
    "Described": "layout",
    "Publisher": "publisher",
    "TensorHubCallback": "bridge",
    "TensorHubTrainerCallback": "hf_trainer",
    "attach": "attaching",
    "attach_fsdp": "fsdp",
    "attach_optimizer": "publisher",
    "describe": "layout",
    "parameters_of": "publisher",
    "publish_from_checkpoint": "checkpoint",
}
"""Where each public name is defined; imported when first used: a callback imports the trainer that it is made for."""

__all__ = [
    "Described",
    "Publisher",
    "TensorHubCallback",
    "TensorHubTrainerCallback",
    "attach",
    "attach_fsdp",
    "attach_optimizer",
    "describe",
    "parameters_of",
    "publish_from_checkpoint",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{place}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
