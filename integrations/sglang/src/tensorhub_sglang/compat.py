"""Everything the adapter knows about how SGLang makes, loads and processes a model.

Written against SGLang 0.5.23; 0.5.21 and 0.5.22 have the same names (`python -m tensorhub_sglang.check` looks).
Each function says what it relies on, so that a new release is checked from top to bottom.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tensorhub_core.errors import ConfigError, StateError
from tensorhub_sglang.limits import find_problems, layout_facts, refusal
from tensorhub_sglang.plug_points import installed_version

WRITTEN_FOR = "0.5.23"
_MAX_TEXT_BYTES = 4096
"""Of what one rank tells the others while the model is loaded."""
_ENVIRONMENT = ("SGLANG_RUST_SERVER",)
_ENGINE = "sglang.srt.entrypoints.engine"
DISPATCHER = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__"
_OWN_PATHS = ("_name_or_path", "torch_dtype", "transformers_version")


def own_options() -> Any:
    """Return this process's options as SGLang resolved them; relies on the published server arguments."""
    from sglang.srt.runtime_context import get_server_args

    return resolved(get_server_args())


def resolved(server_args: Any) -> Any:
    """Return server arguments with what SGLang made of them: the record itself keeps what the user wrote."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(server_args)


def check_supported(options: Any, model_config: Any = None) -> None:
    """Refuse, before anything is loaded, what would be wrong or unsafe; raises ConfigError listing all of it.

    `options`: of `resolved`. Relies on their names, which the static check of `plug_points` has found.
    """
    from sglang.srt.environ import envs

    environment = {name: bool(getattr(envs, name).get()) for name in _ENVIRONMENT if hasattr(envs, name)}
    problems = find_problems(options, environment)
    found = None if model_config is None else model_config.quantization
    if found not in (None, getattr(options, "quantization", None)):
        problems.append(f"quantization {found!r} in the model's config: not supported by this release")
    if problems:
        raise ConfigError(refusal(problems))


def check_model(model: torch.nn.Module, count: int) -> None:
    """Refuse models that SGLang spreads over ranks only after loading; relies on their own word for it."""
    if count > 1 and getattr(model, "supports_torch_tp", False):
        raise ConfigError(refusal([f"{type(model).__name__} on several ranks: it is cut up after loading"]))


def config_key(model_config: Any, options: Any) -> str:
    """Return a name that two engines share only if their ranks' memory is laid out alike."""
    hf = {key: value for key, value in model_config.hf_config.to_dict().items() if key not in _OWN_PATHS}
    facts = {
        "sglang": installed_version(),
        "hf": hf,
        "dtype": str(model_config.dtype),
        "quantization": model_config.quantization,
        "options": layout_facts(options),
    }
    return "sglang:" + hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class SGLangRanks:
    """The tensor-parallel ranks of one engine; relies on `get_parallel()` having a group for the CPU (gloo)."""

    def __init__(self) -> None:
        """Find out which one this process is."""
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        self.index, self.count = int(parallel.tp_rank), int(parallel.tp_size)
        self._group = parallel.tp_group.cpu_group if self.count > 1 else None

    def from_all(self, text: str) -> list[str]:
        """Return what every rank says, in order of rank, each at most `_MAX_TEXT_BYTES`; all have to call it."""
        if self._group is None:
            return [text]
        # As plain bytes of a fixed length: gathering objects would pickle them.
        own = torch.zeros(_MAX_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        data = text.encode()[:_MAX_TEXT_BYTES]
        own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
        gathered = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(gathered, own, group=self._group)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered]


@contextlib.contextmanager
def loading(dtype: torch.dtype) -> Iterator[None]:
    """Let code run as SGLang's own loading does: new tensors of the model's dtype, no gradients."""
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    with set_default_torch_dtype(dtype), torch.no_grad():
        yield


def new_model(model_config: Any, load_config: Any, device: torch.device) -> torch.nn.Module:
    """Create the model without weights, as `DefaultModelLoader.load_model` does; inside `loading`."""
    from sglang.srt.model_loader import loader

    quant_config = loader._get_quantization_config(model_config, load_config)
    with device:
        model: torch.nn.Module = loader._initialize_model(model_config, load_config, quant_config)
    return model


def begin_loading(model: torch.nn.Module, device: torch.device) -> None:
    """Put processed weights back into the form that loading fills, as `begin_weight_update` does."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.restore_weights_before_loading(model, device)


def process(model: torch.nn.Module, device: torch.device) -> None:
    """Make the model compute with the weights that are in its memory, as `end_weight_update` does after no load.

    First what the model derives from them (MLA's halves of kv_b_proj, which are neither parameters nor buffers), then
    each layer's own processing.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights

    post_load_weights(model)
    DefaultModelLoader.postprocess_weights(model, device)


def load_from_disk(loader: Any, model: torch.nn.Module, weights: Iterable[Any], device: torch.device) -> None:
    """Run SGLang's own loading of a checkpoint's tensors, without the processing after it."""
    loader.load_weights_only(model, weights, device)


# --- hooks ------------------------------------------------------------------------------------------------------------


def add_hooks(
    add_arguments: Callable[[Any], None],
    read_arguments: Callable[[dict[str, Any]], dict[str, Any]],
    check: Callable[[Any], None],
    load_format: str,
    loader: Callable[[], type],
) -> None:
    """Register what SGLang calls while it reads its arguments and makes its loader; it applies the hooks itself.

    `read_arguments` changes the fields of a command line; `check(server_args)` is called with resolved arguments.
    Relies on `argparse` being the parser, and on `get_model_loader` taking a class for a load format.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_add(result: Any, parser: Any) -> None:
        add_arguments(parser)

    def around_read(original: Callable[..., Any], cls: Any, args: Any) -> Any:
        fields = read_arguments(dict(vars(args)))
        for name, value in fields.items():
            setattr(args, name, value)
        return original(cls, args)

    def after_check(result: Any, server_args: Any) -> None:
        check(server_args)

    def around_verify(original: Callable[..., None], load_config: Any) -> None:
        if load_config.load_format == load_format:
            load_config.load_format = loader()
        else:
            original(load_config)

    server_args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{server_args}.add_cli_args", after_add, HookType.AFTER)
    HookRegistry.register(f"{server_args}.from_cli_args", around_read, HookType.AROUND)
    HookRegistry.register(f"{server_args}.check_server_args", after_check, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.configs.load_config.LoadConfig._verify_load_format", around_verify, HookType.AROUND
    )


def take_engine_arguments(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have `sglang.Engine(...)` make its ServerArgs by `wrap(its own way)`; again in a process changes nothing.

    Relies on `Engine.__init__` loading plug-ins before it calls `server_args_class`. Where nothing has imported the
    engine yet there is none to make.
    """
    module = sys.modules.get(_ENGINE)
    engine = getattr(module, "Engine", None)
    if engine is None or getattr(engine.server_args_class, "_tensorhub", False):
        return
    made = wrap(engine.server_args_class)
    made._tensorhub = True  # type: ignore[attr-defined]
    engine.server_args_class = staticmethod(made)


def is_hooked(target: str) -> bool:
    """Tell whether a hook of ours is registered on a function of SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return any(_is_ours(hook) for _, hook, _ in HookRegistry._hooks.get(target, ()))


def apply_hooks() -> None:
    """Apply hooks that were registered late, and make sure that all of ours are; raises StateError naming the others.

    SGLang only logs a hook that it could not apply, and drops a late one on a function that has been wrapped already,
    by another plug-in for example: ours then goes around what is there.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    for target in HookRegistry._patched & HookRegistry._hooks.keys():
        dropped = _dropped(target, HookRegistry._hooks[target])
        if dropped:
            HookRegistry._apply_target(target, dropped)
    missing = sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(_is_ours(entry[1]) for entry in hooks)
        and (target not in HookRegistry._patched or _dropped(target, hooks))
    )
    if missing:
        raise StateError(f"SGLang did not apply the adapter's hooks on {', '.join(missing)}")


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).split(".")[0] == __name__.split(".")[0]


def _dropped(target: str, hooks: Iterable[Any]) -> list[Any]:
    """Return those of our hooks on `target` that are not in the chain of wrappers that is called there now."""
    called, found = pkgutil.resolve_name(target), set()
    while called is not None:
        called = getattr(called, "__func__", called)
        found |= {id(cell.cell_contents) for cell in getattr(called, "__closure__", None) or ()}
        called = getattr(called, "__wrapped__", None)
    return [entry for entry in hooks if _is_ours(entry[1]) and id(entry[1]) not in found]
