"""Name the parameters of a module as the model inside of its wrappers does.

Wrappers are told by their classes: a user's own modules may have any names and methods.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorhub_core.errors import RegistrationError

if TYPE_CHECKING:
    import torch

_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",  # of checkpoints, and of offloading
        "_checkpoint_wrapped_module",
    ),
)
"""(module, class, child): classes that stand for one of their children, under a name that is not the model's."""
_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
_DEEPSPEED = ("deepspeed.runtime.engine", "DeepSpeedEngine")
_PEFT_MODELS = ("PeftModel", "BaseTuner")


def named_weights(module: Any) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by the model's own names, tied ones under each of them.

    Raises RegistrationError for adapters, for what FSDP1, DeepSpeed or Megatron keeps of its parameters, for those that
    have no shape yet, and if two would have one name.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        kind = type(module).__qualname__
        raise RegistrationError(f"a {kind} is no torch.nn.Module: give the module whose parameters the optimizer steps")
    require_no_adapters(module)
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in _walk(module, ""):
        if hasattr(parameter, "ds_id"):
            raise RegistrationError(f"{name!r} is partitioned by DeepSpeed ZeRO-3, which is not supported")
        if torch.nn.parameter.is_lazy(parameter):
            raise RegistrationError(f"{name!r} has no shape before its module's first forward pass: attach after that")
        if getattr(parameter, "tensor_model_parallel", False):
            raise RegistrationError(f"{name!r} is one rank's part of a Megatron model: attach() publishes those")
        if found.setdefault(name, parameter) is not parameter:
            raise RegistrationError(
                f"two parameters would be published as {name!r}: one is a wrapper's own, the other of what it wraps"
            )
    return found


def require_no_adapters(module: torch.nn.Module) -> None:
    """Raise RegistrationError naming the first module inside that adds to another one's weights, as LoRA does."""
    for name, part in module.named_modules():
        if _is_adapter(part):
            where = f"{name!r} is" if name else "the model is"
            kind = type(part)
            raise RegistrationError(
                f"{where} a {kind.__module__}.{kind.__qualname__}: a model with adapters has no merged weights that an "
                "engine could load; merge them (peft: publish what merge_and_unload() returns)"
            )


def unwrapped(module: Any) -> Any:
    """Return the module inside of all wrappers around it."""
    while (child := _wrapped(module.__class__)) is not None:
        module = module._modules[child]
    return module


def _walk(module: Any, prefix: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the name and the parameter of everything inside, shared modules once for each of their names.

    Wrappers have `named_parameters` of their own, which leave their names out only where they are the root; and
    `named_children` leaves out the second name of a child.
    """
    wrapped = _wrapped(module.__class__)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, prefix if name == wrapped else f"{prefix}{name}.")


@functools.cache
def _wrapped(kind: Any) -> str | None:
    """Return the name of the child for which a wrapper stands, None if the class is none; raises RegistrationError."""
    if _is_a(kind, *_FSDP1):
        raise RegistrationError("FSDP1 keeps parts of flattened parameters: shard the model with fully_shard()")
    if _is_a(kind, *_DEEPSPEED):
        raise RegistrationError("DeepSpeed changes weights outside of the optimizer's step, and is not supported")
    return next((child for place, name, child in _WRAPPERS if _is_a(kind, place, name)), None)


def _is_a(kind: type, place: str, name: str) -> bool:
    """Tell whether it is a class of torch's or another package's; one that was not imported is nobody's."""
    base = getattr(sys.modules.get(place), name, None)
    return base is not None and issubclass(kind, base)


def _is_adapter(part: Any) -> bool:
    return _is_adapters_class(part.__class__) or any(
        name[:5].lower() == "lora_" for own in (part._modules, part._parameters) for name in own
    )


@functools.cache
def _is_adapters_class(kind: Any) -> bool:
    classes = [(each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__]
    return (
        hasattr(kind, "adapter_layer_names")  # peft's layers of every kind
        or any(package == "peft" and name in _PEFT_MODELS for package, name in classes)
        or any(name == "AdapterWrapper" for _, name in classes)  # of Megatron-Bridge and NeMo
    )
