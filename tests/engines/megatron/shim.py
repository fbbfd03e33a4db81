"""Let megatron-core run on the CPU: its hard-coded look-ups of CUDA devices land there. For tests only.

`install()` comes before the first import of Megatron, `finish()` after it; both change the process they run in, so
they belong into processes of their own (`ranks.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import types
import warnings
from typing import Any

import torch

_MAKERS = ("tensor", "zeros", "empty", "ones", "full", "rand", "arange")


class _Stream:
    """A stream or an event on a device without any: every method is there and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def install() -> None:
    """Send what asks for a CUDA device to the CPU."""
    warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex.*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    device = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: device
    cuda.synchronize = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = lambda *_, **__: _Stream()
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    _name_types_as_cuda()
    for name in _MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    if importlib.util.find_spec("triton") is None:  # imported without a guard by later releases
        stash: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        stash.GLOBAL_BLOCK_SIZE = 1024
        stash.paged_stash_copy_kernel = stash.paged_stash_pop_kernel = None
        sys.modules[stash.__name__] = stash


def _on_cpu(make: Any) -> Any:
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return on_cpu


def _name_types_as_cuda() -> None:
    """The optimizers compare `tensor.type()` with `torch.cuda.FloatTensor`."""
    own = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        asked_by_megatron = "megatron" in sys._getframe(1).f_code.co_filename
        if isinstance(found, str) and asked_by_megatron and not found.startswith("torch.cuda."):
            return found.replace("torch.", "torch.cuda.")
        return found

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def finish() -> None:
    """Replace what Megatron bound to CUDA while it was imported."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = _keep_on_cpu
    with contextlib.suppress(ImportError):  # gone from later releases
        import megatron.core.transformer.moe.grouped_gemm_util as grouped_gemm

        # Without its kernels grouped experts cannot run, but they can be made and described.
        grouped_gemm.assert_grouped_gemm_is_available = lambda: None


def _keep_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
