"""Nothing that a peer, a file or a server sent is ever unpickled or evaluated."""

from __future__ import annotations

import ast

import pytest

from tests.static.sources import EVERYTHING, name_of, python_files, syntax_tree

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
}
BUILTINS = {"eval", "exec"}

ALLOWED = {"tests/processes/server/test_hostile.py", "src/tensorhub_core/checkpoint/pickled.py"}
"""The first makes a hostile pickle to send, and loads none. The second reads the index of a checkpoint on disk, which
is a pickle, and makes no object of a class that one names (tests/unit/checkpoint/test_pickled.py)."""

READERS = {
    "src/tensorhub_core/checkpoint/dcp_index.py",
    "src/tensorhub_core/checkpoint/saved_tensor.py",
    "tests/unit/checkpoint/test_pickled.py",
}
"""What may use `pickled.read_pickle`: files of a user's checkpoint alone, and nothing that came over a wire."""


def offences(tree: ast.AST) -> list[str]:
    """Return every place of a module that unpickles, evaluates, or may do so."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module] if (node.module or "").split(".")[0] in MODULES else []  # type: ignore[list-item]
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            names = [node.attr]
        elif isinstance(node, ast.Call):
            names = _call_offences(node)
        found += [f"line {node.lineno}: {name}" for name in names if name]  # type: ignore[attr-defined]
    return found


def _call_offences(call: ast.Call) -> list[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    function = ast.unparse(call.func)
    if function in BUILTINS:
        return [function]
    if function == "torch.load" and not _is_true(keywords.get("weights_only")):
        return ["torch.load without weights_only=True"]
    if function == "yaml.load":
        return ["yaml.load"]
    return ["allow_pickle"] if _is_true(keywords.get("allow_pickle")) else []


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_nothing_is_unpickled() -> None:
    files = python_files(EVERYTHING)
    found = {name_of(path): offences(syntax_tree(path)) for path in files if name_of(path) not in ALLOWED}
    assert len(files) > 20
    assert {path: places for path, places in found.items() if places} == {}


def test_only_checkpoints_on_disk_are_read_as_pickles() -> None:
    users = {name_of(path) for path in python_files(EVERYTHING) if "read_pickle" in path.read_text(encoding="utf-8")}
    assert users - {"src/tensorhub_core/checkpoint/pickled.py", "tests/static/test_no_pickle.py"} == READERS


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import os, marshal",
        "socket.recv_pyobj()",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "numpy.load('x', allow_pickle=True)",
        "yaml.load(text)",
        "exec(text)",
        "dist.all_gather_object(out, x)",
    ],
)
def test_the_check_sees_it(source: str) -> None:
    assert offences(ast.parse(source))


@pytest.mark.parametrize("source", ["torch.load('x', weights_only=True)", "process.exec_module(m)", "model.eval()"])
def test_the_check_lets_it_pass(source: str) -> None:
    assert offences(ast.parse(source)) == []
