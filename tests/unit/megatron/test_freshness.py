"""What would change published weights outside of a step is refused; what a step leaves for later is gathered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub_core.errors import ConfigError
from tensorhub_megatron.freshness import gather_parameters, require_steps_only


def chunk(calls: list[str], *, config: dict[str, Any] | None = None, **ddp_config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        config=SimpleNamespace(**(config or {})),
        ddp_config=SimpleNamespace(**ddp_config),
        start_param_sync=lambda *, force_sync: calls.append(f"gather {force_sync}"),
    )


def test_parameters_are_gathered_where_megatron_would_do_it_later() -> None:
    calls: list[str] = []
    gather_parameters([chunk(calls, overlap_param_gather=True), chunk(calls, overlap_param_gather=True)])
    assert calls == ["gather True", "gather True"]


def test_nothing_is_gathered_twice() -> None:
    calls: list[str] = []
    gather_parameters([chunk(calls, overlap_param_gather=False), SimpleNamespace()])
    assert calls == []


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"config": {"qk_clip": True}}, "qk_clip"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf_for_mxfp8_param_ag"),
        ({"use_megatron_fsdp": True}, "Megatron-FSDP"),
    ],
)
def test_what_changes_weights_outside_of_a_step_is_refused(how: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        require_steps_only([chunk([]), chunk([], **how)])


def test_what_changes_weights_in_steps_alone_is_taken() -> None:
    require_steps_only([chunk([], config={"qk_clip": False}, use_megatron_fsdp=False), SimpleNamespace()])
