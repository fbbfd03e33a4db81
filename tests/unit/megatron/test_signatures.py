"""Every way to publish takes what its siblings take, under the same name, with the same default."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tensorhub_megatron
from tensorhub_core import connect

COMMON: dict[str, Any] = {
    "server": None,
    "model": "policy",
    "stream": None,
    "replica": "trainer",
    "transport": "auto",
    "settings": None,
}
STEPPING: dict[str, Any] = {**COMMON, "start_version": 0, "every": 1, "timeout_s": None}
CALLS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "attach": (STEPPING, {"model_chunks", "optimizer", "hf_config", "extra_names", "group"}),
    "attach_fsdp": (STEPPING, {"module", "optimizer", "cast", "group"}),
    "attach_optimizer": (STEPPING, {"module", "optimizer", "tensors"}),
    "publish_from_checkpoint": (
        {**COMMON, "replica": None},
        {"folder", "hf_config", "version", "extra_names", "copy"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_siblings_take_the_same(name: str) -> None:
    common, own = CALLS[name]
    found = inspect.signature(getattr(tensorhub_megatron, name)).parameters
    assert {each: found[each].default for each in common} == common
    assert found.keys() - common.keys() == own
    assert all(found[each].kind is inspect.Parameter.KEYWORD_ONLY for each in common)
    types = inspect.signature(connect).parameters
    for each in ("server", "stream", "settings"):
        assert found[each].annotation == types[each].annotation, each


def test_the_callback_of_megatron_bridge_takes_what_attach_takes() -> None:
    tensorhub_megatron.TensorHubCallback(**{**STEPPING, "group": None, "hf_config": {}, "extra_names": {}})
    found = inspect.signature(tensorhub_megatron.TensorHubCallback).parameters
    assert found["server"].annotation == inspect.signature(connect).parameters["server"].annotation
