"""Everything the adapter knows about one release of vLLM: what to call, what to patch, what cannot work.

Written against vLLM 0.32. Each function says what it relies on, so that a new release is checked from top to bottom.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from importlib.metadata import entry_points
from typing import Any

import torch

from tensorhub_core.errors import ConfigError

WRITTEN_FOR = "0.32"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
_NATIVE_RPCS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
_MAX_TEXT_BYTES = 4096
"""Of what one rank tells the others about its failure."""


def vllm_version() -> str:
    """Return vLLM's version; the CPU build reports itself under another distribution's name."""
    import vllm

    return str(vllm.__version__)


def check_supported(vllm_config: Any) -> None:
    """Refuse, before anything is loaded, what would be wrong or unsafe; raises ConfigError listing all of it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    problems = []
    if model.quantization is not None:
        problems.append(f"quantization={model.quantization}: not supported by this release")
    if parallel.data_parallel_size > 1:
        problems.append("data_parallel_size > 1: start one engine per replica instead")
    if getattr(parallel, "enable_eplb", False):
        problems.append("enable_eplb: experts that move between ranks cannot be described")
    if getattr(model, "enable_sleep_mode", False):
        problems.append("enable_sleep_mode: memory that others may read must not be released")
    if problems:
        raise ConfigError("--weight-source tensorhub does not work with:\n- " + "\n- ".join(problems))


def config_key(vllm_config: Any) -> str:
    """Return a name that two engines share only if their ranks' memory is laid out alike."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    hf = {key: value for key, value in model.hf_config.to_dict().items() if key not in ("_name_or_path", "torch_dtype")}
    facts = {
        "vllm": vllm_version(),
        "hf": hf,
        "dtype": str(model.dtype),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "ep": parallel.enable_expert_parallel,
        "quantization": model.quantization,
        "device": str(vllm_config.device_config.device_type),
    }
    return "vllm:" + hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def rank_and_count() -> tuple[int, int]:
    """Return this process's shard index and the engine's number of shards."""
    from vllm.distributed import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    return pp.rank_in_group * tp.world_size + tp.rank_in_group, tp.world_size * pp.world_size


class EngineRanks:
    """Core's `Ranks` over vLLM's process groups."""

    def __init__(self) -> None:
        """Look the groups up; they are there when a model is loaded."""
        self.index, self.count = rank_and_count()

    def from_all(self, text: str) -> list[str]:
        """Return what every rank says, in order of rank."""
        return from_all_ranks(text)


def process(model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device) -> None:
    """Run vLLM's own post-load processing on parameters that are in their loaded form."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with (
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(model_config.dtype),
        torch.no_grad(),
        without_adapters(model),
    ):
        if device.type == "cpu":
            _forget_moe_kernels(model)
        process_weights_after_loading(model, model_config, device)


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Let a model be as it was made inside the block: for `--enable-lora`, vLLM has put layers around its own since.

    Those pass for the layers in them, which would be processed twice, and change the names of their weights.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    around = [
        (children, name, child)
        for children in [module._modules for module in model.modules()]
        for name, child in children.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for children, name, child in around:
            children[name] = child.base_layer
        yield
    finally:
        for children, name, child in around:
            children[name] = child


def _forget_moe_kernels(model: torch.nn.Module) -> None:
    """Let CPU experts be packed anew: with a kernel in place, `_setup_kernel` would only copy into what is there."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def allow_plugin(name: str) -> None:
    """Make vLLM load our HTTP routes: only those named in VLLM_PLUGINS are, and naming one hides all other plugins."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is None:
        others = {entry.name for group in _PLUGIN_GROUPS for entry in entry_points(group=group)}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(others | {name}))
    elif name not in named.split(","):
        os.environ["VLLM_PLUGINS"] = f"{named},{name}" if named else name


def add_cli_arguments(add: Callable[[argparse.ArgumentParser], None]) -> None:
    """Have `add` called for every parser of engine arguments; calling again for the same process changes nothing."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.__dict__["add_cli_args"].__func__
    if getattr(original, "_tensorhub", False):
        return

    @functools.wraps(original)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        add(parser)
        return parser

    add_cli_args._tensorhub = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def guard_native_rpcs(is_ours: Callable[[Any], bool]) -> None:
    """Make a failure of vLLM's weight-transfer calls safe for engines of several ranks, for our backend only.

    vLLM's executor stops reading replies at the first rank that fails, and every later call then gets the replies of
    the one before. So all ranks agree on whether a call failed, forget the session alike, and only the last rank, whose
    reply is read last, raises.
    """
    from vllm.v1.worker.gpu_worker import Worker

    for name in _NATIVE_RPCS:
        original = getattr(Worker, name)
        if not getattr(original, "_tensorhub", False):
            setattr(Worker, name, _guarded(original, is_ours))
    original = Worker.shutdown_weight_transfer_engine
    if not getattr(original, "_tensorhub", False):
        Worker.shutdown_weight_transfer_engine = _disconnecting(original, is_ours)


def before_shutdown(engine: Any, leave: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
    """Have `leave` run before vLLM ends its engine, which it does by killing the workers (`--shutdown-timeout 0`).

    vLLM calls `shutdown` from another thread than the event loop's; `leave` is given `timeout_s`.
    """
    loop, original = asyncio.get_running_loop(), engine.shutdown

    @functools.wraps(original)
    def shutdown(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):
            if loop.is_running() and asyncio.events._get_running_loop() is not loop:
                asyncio.run_coroutine_threadsafe(leave(), loop).result(timeout_s)
        original(*args, **kwargs)

    engine.shutdown = shutdown


def _guarded(original: Callable[..., None], is_ours: Callable[[Any], bool]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(worker: Any, *args: Any, **kwargs: Any) -> None:
        engine = worker.weight_transfer_engine
        if not is_ours(engine):
            return original(worker, *args, **kwargs)
        error: Exception | None = None
        try:
            original(worker, *args, **kwargs)
        except Exception as caught:
            error = caught
        errors = from_all_ranks("" if error is None else str(error) or type(error).__name__)
        if not any(errors):
            return None
        worker._weight_update_active = False
        engine.reset_weight_update_target()
        if len(errors) == 1 and error is not None:
            raise error
        if worker.rank == len(errors) - 1:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
            raise RuntimeError(told) from error
        return None

    call._tensorhub = True  # type: ignore[attr-defined]
    return call


def _disconnecting(original: Callable[..., None], is_ours: Callable[[Any], bool]) -> Callable[..., None]:
    """vLLM ends an engine's transfers by `shutdown` both when a caller asks for it and when the worker ends."""

    @functools.wraps(original)
    def call(worker: Any) -> None:
        if not is_ours(worker.weight_transfer_engine):
            return original(worker)
        return worker.weight_transfer_engine.disconnect()  # type: ignore[no-any-return]

    call._tensorhub = True  # type: ignore[attr-defined]
    return call


def from_all_ranks(text: str) -> list[str]:
    """Return what every rank of the engine says, in order of rank; each at most `_MAX_TEXT_BYTES`."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [text]
    # As plain bytes of a fixed length: gathering objects would pickle them.
    own = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8)
    data = text.encode()[:_MAX_TEXT_BYTES]
    own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(gathered, own, group=group.cpu_group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered]


@contextlib.contextmanager
def new_model(loader: Any, vllm_config: Any, model_config: Any, prefix: str) -> Iterator[tuple[Any, torch.device]]:
    """Create the model without weights and yield it with its device, in the context that loading needs."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    device = torch.device(loader.load_config.device or vllm_config.device_config.device)
    with set_default_torch_dtype(model_config.dtype):
        with device:
            model = loader.create_model(vllm_config, model_config, prefix)
        yield model, device
