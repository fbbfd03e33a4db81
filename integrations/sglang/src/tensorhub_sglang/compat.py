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


PLUG_POINTS: tuple[PlugPoint, ...] = (
    PlugPoint("sglang.srt.plugins", "load_plugins", "runs plug-ins in every process"),
    PlugPoint(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        "wraps functions of SGLang",
        ("target", "hook", "hook_type"),
    ),
    PlugPoint("sglang.srt.plugins.hook_registry", "HookType.AROUND", "kind of wrapping"),
    PlugPoint("sglang.srt.plugins.hook_registry", "HookType.AFTER", "kind of wrapping"),
    PlugPoint("sglang.srt.arg_groups.choices", "add_load_format_choices", "adds a load format"),
    PlugPoint("sglang.srt.configs.load_config", "LoadConfig._verify_load_format", "turns it into a loader"),
    PlugPoint("sglang.srt.server_args", "ServerArgs.add_cli_args", "adds --weight-source", ("parser",)),
    PlugPoint("sglang.srt.server_args", "ServerArgs.from_cli_args", "reads --weight-source", ("args",)),
    PlugPoint("sglang.srt.managers.io_struct", "hook_custom_types", "sends our requests between processes"),
    PlugPoint("sglang.srt.managers.scheduler", "Scheduler.init_request_dispatcher", "handles them on every rank"),
    PlugPoint("sglang.srt.managers.tokenizer_control_mixin", "_COMMUNICATOR_SPECS", "collects the answers"),
    PlugPoint("sglang.srt.managers.tokenizer_manager", "TokenizerManager.__init__", "adds HTTP routes"),
    PlugPoint("sglang.utils", "TypeBasedDispatcher", "dispatches by request type"),
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
    found = (_problem(folder, point) for point in points)
    return tuple(problem for problem in found if problem)


def _problem(folder: Path, point: PlugPoint) -> str | None:
    where = f"{point.module}.{point.name} ({point.purpose})"
    path = _source_of(folder, point.module)
    if path is None:
        return f"{where}: the module does not exist"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return f"{where}: the module cannot be read: {error}"
    body: Sequence[ast.stmt] = tree.body
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
