"""A rank's weights as SGLang loads them, which is also how it computes with them.

Where SGLang packs, shuffles or replaces weights after loading, the loaded form would have to be kept as well, to be
filled again: such a model is refused. For all others one memory serves for loading, computing and reading by peers, and
bytes of a peer need the same as bytes of a trainer: that what the model derives from its weights is derived again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub_core.errors import ConfigError
from tensorhub_sglang import compat


class LoadedWeights:
    """SGLang's `EngineMemory`: make it after the model was created and before anything was loaded."""

    in_place = False

    def __init__(self, model: torch.nn.Module, key: str, dtype: torch.dtype, device: torch.device) -> None:
        """Keep the model's parameters and persistent buffers; raises ConfigError if they are not on the device."""
        self.model, self.key, self.device = model, key, device
        self._dtype = dtype
        self._tensors = tensors_of(model)
        self._places = {name: _place(tensor) for name, tensor in self._tensors.items()}
        away = [name for name, tensor in self._tensors.items() if tensor.device.type != device.type]
        if away:
            raise ConfigError(f"weights that are not on {device} cannot be filled from a hub: {', '.join(away[:4])}")

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return what loading fills, tied tensors once."""
        return self._tensors

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the model's own `load_weights`."""
        with compat.loading(self._dtype):
            compat.begin_loading(self.model, self.device)
            return self.model.load_weights(weights)  # type: ignore[operator]

    def missing(self, untouched: Sequence[str]) -> Sequence[str]:
        """Name the parameters; an unquantised model needs all of them, while buffers come from its configuration."""
        return [name for name in untouched if isinstance(self._tensors[name], torch.nn.Parameter)]

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Do nothing: the model has its loaded form."""
        yield

    def process(self) -> None:
        """Derive anew what the model computes with.

        Raises ConfigError if that changes the weights themselves: others may be reading them.
        """
        watch = _Writes(self._tensors)
        with compat.loading(self._dtype), watch:
            compat.process(self.model, self.device)
        changed = [*watch.names, *self._moved()]
        if changed:
            raise ConfigError(
                f"after loading, SGLang changes {', '.join(dict.fromkeys(changed[:4]))} for the kernels that it uses: "
                "keeping the loaded form as well would take its memory twice, which this release does not do; "
                "choose another backend"
            )

    def _moved(self) -> list[str]:
        now = tensors_of(self.model)
        return [name for name, place in self._places.items() if name not in now or _place(now[name]) != place]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and persistent buffers by name, tied ones once."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = {name: tensor for name, tensor in model.named_buffers() if name not in transient}
    return {**dict(model.named_parameters()), **buffers}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note which tensors are written while it is active, on this thread; copies onto themselves do not count."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_storage = {_storage(tensor): name for name, tensor in tensors.items() if tensor.numel()}
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[at] if at < len(args) else kwargs.get(argument.name)
            for tensor in written if isinstance(written, list | tuple) else (written,):
                if isinstance(tensor, torch.Tensor) and not _onto_itself(func, tensor, args):
                    name = self._by_storage.get(_storage(tensor))
                    if name is not None:
                        self.names.append(name)
        return func(*args, **kwargs)


def _onto_itself(func: Any, tensor: torch.Tensor, args: Any) -> bool:
    if func is not torch.ops.aten.copy_.default or not isinstance(args[1], torch.Tensor):
        return False
    return _place(tensor) == _place(args[1])


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
