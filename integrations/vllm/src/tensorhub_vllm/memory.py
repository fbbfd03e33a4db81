"""A rank's weights in the form in which vLLM loads them, kept and put back for every swap.

After a load, vLLM exchanges parameters for packed ones (on CPU the live weight even hides in a closure), so that the
loaded form can neither be filled nor processed again. This keeps the original Parameter objects, with their
`weight_loader` attributes, and their memory: a swap fills that memory in place, puts the objects back and runs vLLM's
own processing again. Where processing leaves a parameter alone, the kept one is the live one and costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorhub_core.errors import ConfigError
from tensorhub_vllm import compat


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in the model where a parameter or persistent buffer hangs; tied ones have several."""

    name: str
    module: torch.nn.Module
    leaf: str
    tensor: torch.Tensor
    data: torch.Tensor

    @property
    def table(self) -> dict[str, Any]:
        """Return the module's dictionary that holds it."""
        return self.module._parameters if isinstance(self.tensor, torch.nn.Parameter) else self.module._buffers

    def put_back(self) -> None:
        """Make the loaded form the live one again."""
        self.table[self.leaf] = self.tensor
        if self.tensor.data_ptr() != self.data.data_ptr() or self.tensor.shape != self.data.shape:
            self.tensor.data = self.data


class LoadedWeights:
    """vLLM's `EngineMemory`: capture it after the model was created and before anything was processed."""

    in_place = False

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        model_config: Any,
        device: torch.device,
        slots: Iterable[Slot] | None = None,
    ) -> None:
        """Keep the model's parameters as they are now, or other `slots` that are not in it yet.

        Raises ConfigError if they have no memory on the device.
        """
        self.model, self.device = model, device
        self._vllm_config, self._model_config = vllm_config, model_config
        self.key = compat.config_key(vllm_config)
        self._processed = slots is not None
        self._slots = list(slots_of(model) if slots is None else slots)
        away = [slot.name for slot in self._slots if slot.data.device.type != device.type]
        if away:
            raise ConfigError(f"weights that are not on {device} cannot be filled from a hub: {', '.join(away[:4])}")

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the loaded form, tied tensors once."""
        found: dict[int, Slot] = {}
        for slot in self._slots:
            found.setdefault(id(slot.tensor), slot)
        return {slot.name: slot.tensor for slot in found.values()}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the model's own `load_weights` on the loaded form."""
        from vllm.config import set_current_vllm_config

        self._put_back()
        with set_current_vllm_config(self._vllm_config), torch.no_grad(), compat.without_adapters(self.model):
            return self.model.load_weights(weights)  # type: ignore[operator]

    def missing(self, untouched: Sequence[str]) -> Sequence[str]:
        """Name the parameters; an unquantised model needs all of them, while buffers come from its configuration."""
        parameters = {slot.name for slot in self._slots if isinstance(slot.tensor, torch.nn.Parameter)}
        return [name for name in untouched if name in parameters]

    def process(self) -> None:
        """Put the loaded form back and run vLLM's post-load processing on it."""
        live = list(slots_of(self.model)) if self._processed else []
        self._put_back()
        compat.process(self.model, self._vllm_config, self._model_config, self.device)
        if self.device.type != "cpu":
            keep_addresses(live)
            self._check_no_second_copy()
        self._processed = True

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Let the model have its loaded form inside the block, and what it computes with again after it."""
        live = list(slots_of(self.model))
        try:
            yield
        finally:
            for slot in live:
                slot.put_back()

    def _put_back(self) -> None:
        for slot in self._slots:
            slot.put_back()

    def _check_no_second_copy(self) -> None:
        """On an accelerator, refuse models whose processing needs other memory than was loaded into."""
        moved = [slot.name for slot in self._slots if slot.table[slot.leaf].data_ptr() != slot.data.data_ptr()]
        if moved:
            raise ConfigError(
                f"on {self.device.type}, vLLM replaces {', '.join(moved[:4])} after loading: keeping the loaded form "
                "as well would take its memory twice, which this release does not do"
            )


def slots_of(model: torch.nn.Module) -> Iterator[Slot]:
    """Yield every place of every parameter and persistent buffer."""
    for prefix, module in model.named_modules():
        transient = module._non_persistent_buffers_set
        for table, skip in ((module._parameters, set()), (module._buffers, transient)):
            for leaf, tensor in table.items():
                if tensor is not None and leaf not in skip:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    yield Slot(name, module, leaf, tensor, tensor.data)


def keep_addresses(live: Sequence[Slot]) -> None:
    """Copy what processing made into the tensors that were live before: captured graphs hold their addresses."""
    for slot in live:
        fresh = slot.table.get(slot.leaf)
        if fresh is None or fresh is slot.tensor or fresh.data_ptr() == slot.data.data_ptr():
            continue
        if fresh.shape == slot.data.shape and fresh.dtype == slot.data.dtype:
            slot.data.copy_(fresh.data)
            slot.table[slot.leaf] = slot.tensor
