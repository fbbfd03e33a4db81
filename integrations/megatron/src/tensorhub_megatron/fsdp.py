"""Publish the parameters of a module that PyTorch shards (FSDP2), or that every rank has whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorhub_core.errors import ConfigError
from tensorhub_megatron.attaching import attach_weights
from tensorhub_megatron.publication import Registration
from tensorhub_megatron.publisher import Publisher
from tensorhub_megatron.sharded import boxes_of_shard, local_part, named_shards
from tensorhub_megatron.stepping import warn_of_others

if TYPE_CHECKING:
    import torch

    from tensorhub_core.settings import Settings

_CASTS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}


def attach_fsdp(
    module: torch.nn.Module,
    optimizer: Any,
    *,
    server: str | Sequence[str] | None = None,
    model: str = "policy",
    stream: str | None = None,
    start_version: int = 0,
    every: int = 1,
    cast: str | None = None,
    replica: str = "trainer",
    group: Any = None,
    timeout_s: float | None = None,
    transport: str = "auto",
    settings: Mapping[str, object] | Settings | None = None,
) -> Publisher:
    """Publish the parameters of `module` as `start_version`, and again after every `every`-th step of `optimizer`.

    Call it once on every rank, after `fully_shard()` and the optimizer. Each rank publishes the shards that it has,
    in place, under the module's own names (Hugging Face models have theirs already): no rank ever gathers a parameter.
    FSDP2 (with tensor parallelism or replication too), `DistributedDataParallel` and plain modules work; a module that
    every rank has whole is read from whichever of them is least busy. All ranks are shards of one replica: shard = rank
    in `group` (None: all ranks), num_shards = its size.

    `cast="bf16"` (or "fp16") is for trainers that keep float32 parameters for engines of half the size: each
    rank publishes a copy of its shards in that type, rounded to nearest as `Tensor.to` does, and filled anew after each
    step; it takes half of the parameters' memory in addition. Everything else is as for `attach()`.

    Raises ConfigError, RegistrationError for parameters that cannot be described (FSDP1, DeepSpeed ZeRO-3, adapters),
    StateError if the optimizer is attached already, and what `connect`, `register` and `publish` raise; nothing stays
    attached then, on any rank.
    """
    warn_of_others(module, optimizer)
    return attach_weights(
        ShardedWeights(module, cast),
        optimizer,
        names=(model, replica, stream),
        server=server,
        start_version=start_version,
        every=every,
        group=group,
        timeout_s=timeout_s,
        transport=transport,
        settings=settings,
    )


class ShardedWeights:
    """What one rank has of a module's parameters: the memory itself, or a copy of it in another floating type."""

    def __init__(self, module: Any, cast: str | None = None) -> None:
        """Check `cast`; raises ConfigError for a type that is not known."""
        if cast is not None and cast not in _CASTS:
            raise ConfigError(f"cast must be one of {', '.join(_CASTS)}, not {cast!r}")
        self._module = module
        self._cast = cast
        self._parts: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[object, ...]] = {}
        self._copies: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def refresh(self) -> None:
        """Fill the copies; without them parameters are what the step has written."""
        if self._copies and not self.moved():
            self._fill()

    def describe(self) -> Registration:
        """Say what this rank holds, and make the copies."""
        shards = named_shards(self._module)
        self._parts = {name: local_part(parameter) for name, parameter in shards.items()}
        self._places = {name: _place(part) for name, part in self._parts.items()}
        self._copies = {}
        tensors = {name: self._published(part) for name, part in self._parts.items()}
        self._fill()
        boxes = {
            name: boxes_of_shard(name, name, parameter)
            for name, parameter in shards.items()
            if parameter.numel() or self._parts[name].shape != parameter.shape  # no box names what has no elements
        }
        return Registration(tensors, boxes)

    def moved(self) -> bool:
        """Tell whether a parameter was exchanged, or given other memory."""
        now = named_shards(self._module)
        return {name: _place(local_part(parameter)) for name, parameter in now.items()} != self._places

    def _published(self, part: torch.Tensor) -> torch.Tensor:
        """Return what is registered for a part: itself, or its copy; tied parts have one copy."""
        import torch

        if self._cast is None or not part.is_floating_point():
            return part
        dtype: torch.dtype = getattr(torch, _CASTS[self._cast])
        if part.dtype == dtype:
            return part
        made = torch.empty(part.shape, dtype=dtype, device=part.device)
        # Empty parts may all lie nowhere.
        key = _place(part) if part.numel() else (id(made),)
        return self._copies.setdefault(key, (part, made))[1]

    def _fill(self) -> None:
        import torch

        with torch.no_grad():
            for part, copy in self._copies.values():
                copy.copy_(part)


def _place(part: torch.Tensor) -> tuple[object, ...]:
    return (part.data_ptr(), part.shape, part.stride(), part.dtype, part.device)
