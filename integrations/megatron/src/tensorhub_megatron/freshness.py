"""What depends on the version of Megatron in a training step: when parameters are what the step has made.

Written for megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorhub_core.errors import ConfigError


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Make every parameter hold what the last step made; called by all ranks, it gathers.

    With `overlap_param_gather` the distributed optimizer leaves that to the next forward pass. A gather that goes on
    already is waited for. The forward pass then finds it done, or gathers the same bytes again.
    """
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        if getattr(config, "overlap_param_gather", False) and hasattr(chunk, "start_param_sync"):
            chunk.start_param_sync(force_sync=True)


def require_steps_only(chunks: Sequence[Any]) -> None:
    """Raise ConfigError naming what would change published weights outside of the optimizer's step."""
    for chunk in chunks:
        config, ddp = getattr(chunk, "config", None), getattr(chunk, "ddp_config", None)
        if getattr(config, "qk_clip", False):
            raise ConfigError(
                "qk_clip changes the weights after the optimizer's step, when they are published already: switch it "
                "off, or publish by hand with tensorhub_core.connect()"
            )
        if getattr(ddp, "reuse_grad_buf_for_mxfp8_param_ag", False):
            raise ConfigError(
                "reuse_grad_buf_for_mxfp8_param_ag fills the parameters during the next forward pass: switch it off"
            )
        if getattr(ddp, "use_megatron_fsdp", False) or getattr(ddp, "use_custom_fsdp", False):
            raise ConfigError("Megatron-FSDP keeps its shards in buffers of its own, which are not supported")
