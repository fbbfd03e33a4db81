"""Make the loaded form of weights anew for a model that vLLM itself loaded and processed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tensorhub_vllm.memory import Slot, slots_of


def rebuilt_slots(model: torch.nn.Module) -> Iterator[Slot]:
    """Yield a slot for every parameter in its loaded form, with new memory where processing left another one.

    vLLM records what every layer looked like before loading (`record_metadata_for_reloading`). New memory is not put
    into the model and its content is undefined: the model goes on computing with what it has until it is filled.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    for slot in slots_of(model):
        info = get_layerwise_info(slot.module)
        recorded = info.restore_metadata[0].get(slot.leaf)
        if recorded is None or (recorded.shape == slot.data.shape and recorded.dtype == slot.data.dtype):
            yield slot
            continue
        with info.restore_device:
            fresh = materialize_meta_tensor(recorded)
        fresh = restore_layer_refs(fresh, slot.module)
        yield Slot(slot.name, slot.module, slot.leaf, fresh, fresh.data)
