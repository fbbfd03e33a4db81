"""Tell whether an SGLang installation has the places where an adapter plugs in.

The check reads SGLang's source and imports none of it: it works on a machine without its kernels, and before any of its
processes has started. SGLang only logs the failure of a plug-in, so what is missing must be known before it loads one.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tensorhub_core.errors import TensorHubError
from tensorhub_sglang.limits import LAYOUT, OPTIONS


class SGLangUnsuitable(TensorHubError):
    """SGLang is missing, or lacks a place where the adapter plugs in: install a release that has it."""

    code = "sglang_unsuitable"


@dataclass(frozen=True, slots=True)
class PlugPoint:
    """A name in SGLang that the adapter needs: `name` in `module`, taking at least `parameters`."""

    module: str
    name: str
    purpose: str
    parameters: tuple[str, ...] = ()


_LOADER = "sglang.srt.model_loader.loader"

PLUG_POINTS: tuple[PlugPoint, ...] = (
    PlugPoint("sglang.srt.plugins", "load_plugins", "runs plug-ins in every process"),
    PlugPoint(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        "wraps functions of SGLang",
        ("target", "hook", "hook_type"),
    ),
    PlugPoint("sglang.srt.plugins.hook_registry", "HookRegistry.apply_hooks", "does so"),
    PlugPoint("sglang.srt.plugins.hook_registry", "HookRegistry._apply_target", "does so late", ("target", "hooks")),
    PlugPoint("sglang.srt.plugins.hook_registry", "HookRegistry._patched", "tells what was wrapped"),
    PlugPoint("sglang.srt.plugins.hook_registry", "HookType.AROUND", "kind of wrapping"),
    PlugPoint("sglang.srt.plugins.hook_registry", "HookType.AFTER", "kind of wrapping"),
    PlugPoint(
        "sglang.srt.configs.load_config", "LoadConfig._verify_load_format", "turns our load format into a loader"
    ),
    PlugPoint("sglang.srt.server_args", "ServerArgs.add_cli_args", "adds --weight-source", ("parser",)),
    PlugPoint("sglang.srt.server_args", "ServerArgs.from_cli_args", "reads --weight-source", ("args",)),
    PlugPoint("sglang.srt.server_args", "ServerArgs.check_server_args", "refuses what does not work with it"),
    PlugPoint("sglang.srt.entrypoints.engine", "Engine.server_args_class", "takes our arguments of sglang.Engine"),
    PlugPoint("sglang.srt.arg_groups.model_override_base", "resolving_view", "reads options", ("server_args",)),
    PlugPoint("sglang.srt.runtime_context", "get_server_args", "has the options of a process"),
    PlugPoint("sglang.srt.runtime_context", "get_parallel", "tells which rank this is"),
    PlugPoint("sglang.srt.arg_groups.fields.parallel", "Parallel.tp_group", "lets ranks speak to each other"),
    PlugPoint(_LOADER, "get_model_loader", "asks for a loader", ("load_config", "model_config")),
    PlugPoint(_LOADER, "_get_quantization_config", "prepares a model", ("model_config", "load_config")),
    PlugPoint(_LOADER, "_initialize_model", "makes a model", ("model_config", "load_config", "quant_config")),
    PlugPoint(_LOADER, "post_load_weights", "derives what a model computes with from weights", ("model",)),
    PlugPoint(_LOADER, "DefaultModelLoader._get_all_weights", "reads weights from disk", ("model_config", "model")),
    PlugPoint(
        _LOADER, "DefaultModelLoader.load_weights_only", "loads what was read", ("model", "weights", "target_device")
    ),
    PlugPoint(_LOADER, "DefaultModelLoader.postprocess_weights", "processes weights", ("model", "target_device")),
    PlugPoint(
        _LOADER,
        "DefaultModelLoader.restore_weights_before_loading",
        "begins an update of weights",
        ("model", "target_device"),
    ),
    PlugPoint("sglang.srt.model_loader.utils", "set_default_torch_dtype", "context of loading", ("dtype",)),
    *(
        PlugPoint("sglang.srt.managers.io_struct", name, "what processes send each other")
        for name in ("BaseReq", "hook_custom_types", "ContinueGenerationReqInput.torch_empty_cache")
    ),
    PlugPoint("sglang.srt.managers.io_struct", "PauseGenerationReqInput.mode", "stops generation"),
    *(
        PlugPoint("sglang.srt.managers.tokenizer_manager", f"TokenizerManager.{name}", "is the server's side of a swap")
        for name in (
            *("__init__", "auto_create_handle_loop", "_dispatch_to_scheduler", "pause_generation"),
            *("continue_generation", "abort_request", "generate_request", "update_weights_from_disk"),
        )
    ),
    *(
        PlugPoint(
            "sglang.srt.managers.tokenizer_control_mixin",
            f"TokenizerControlMixin.{name}",
            "is what callers may do with weights",
        )
        for name in (
            *("release_memory_occupation", "resume_memory_occupation", "check_weights", "update_weight_version"),
            *("_update_weight_version_if_provided", "update_weights_from_distributed", "update_weights_from_tensor"),
        )
    ),
    PlugPoint("sglang.srt.entrypoints.http_server", "_setup_and_run_http_server", "adds HTTP routes"),
    PlugPoint("sglang.srt.entrypoints.engine", "Engine.shutdown", "ends an engine"),
    PlugPoint("sglang.srt.managers.scheduler", "Scheduler.flush_cache", "forgets old weights", ("empty_cache",)),
    PlugPoint(
        "sglang.srt.managers.scheduler",
        "Scheduler.record_weight_version_change",
        "names versions",
        ("new_version",),
    ),
    PlugPoint("sglang.srt.managers.scheduler", "Scheduler.init_model_worker", "loads the model"),
    PlugPoint("sglang.srt.managers.scheduler", "Scheduler.init_request_dispatcher", "handles them on every rank"),
    PlugPoint("sglang.utils", "TypeBasedDispatcher", "dispatches by request type"),
    *(
        PlugPoint(
            f"sglang.srt.arg_groups.fields.{option.where.split('.')[0]}",
            f"{option.where.split('.')[1]}.{option.name}",
            "tells whether the engine can be filled" if option.why else "tells how weights lie in memory",
        )
        for option in (*OPTIONS, *LAYOUT)
        if option.always
    ),
)


def installed_folder() -> Path:
    """Return the folder of the installed SGLang package; raises SGLangUnsuitable if there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SGLangUnsuitable("SGLang is not installed for this interpreter")
    return Path(next(iter(spec.submodule_search_locations)))


def installed_version() -> str:
    """Return the installed SGLang's version, or `unknown`."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def find_problems(folder: Path, points: Sequence[PlugPoint] = PLUG_POINTS) -> tuple[str, ...]:
    """Return one line for every plug-in point that the package at `folder` lacks, in order; empty = suitable."""
    trees: dict[Path, ast.Module] = {}
    found = (_problem(folder, point, trees) for point in points)
    return tuple(problem for problem in found if problem)


def _problem(folder: Path, point: PlugPoint, trees: dict[Path, ast.Module]) -> str | None:
    where = f"{point.module}.{point.name} ({point.purpose})"
    path = _source_of(folder, point.module)
    if path is None:
        return f"{where}: the module does not exist"
    try:
        if path not in trees:
            trees[path] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return f"{where}: the module cannot be read: {error}"
    body: Sequence[ast.stmt] = trees[path].body
    node: ast.stmt | None = None
    for part in point.name.split("."):
        node = _defined(body, part)
        if node is None:
            return f"{where}: {part} is not defined"
        body = node.body if isinstance(node, ast.ClassDef) else ()
    return _missing_parameters(where, node, point.parameters)


def _missing_parameters(where: str, node: ast.stmt | None, wanted: Sequence[str]) -> str | None:
    if not wanted:
        return None
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{where}: not a function"
    arguments = node.args
    names = {item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    missing = [name for name in wanted if name not in names]
    return f"{where}: takes no parameter {', '.join(missing)}" if missing else None


def _source_of(folder: Path, module: str) -> Path | None:
    base = folder.joinpath(*module.split(".")[1:])
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _defined(body: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """Return the statement of `body` that defines `name`, also inside `if` and `try`.

    A function or class is preferred to an assignment, since SGLang rebuilds some classes under their own name.
    """
    assigned: ast.stmt | None = None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.If | ast.Try):
            inner = _defined([*node.body, *node.orelse], name)
            if inner is not None and not isinstance(inner, ast.Assign | ast.AnnAssign):
                return inner
            assigned = inner or assigned
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assigned = node
    return assigned
