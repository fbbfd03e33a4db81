"""Files stay under 400 lines and functions under 60, so that each can be read at once."""

from __future__ import annotations

import ast

from tests.static.sources import EVERYTHING, name_of, python_files, syntax_tree

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60

LONG_FILES = {
    "src/tensorhub_core/state/messages.py": 480,  # one list: the whole protocol, from which its page is generated
}
"""The exceptions, each with its own bound and the reason."""


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(EVERYTHING)}
    long = {name: lines for name, lines in lengths.items() if lines > LONG_FILES.get(name, MOST_LINES_OF_A_FILE)}
    assert long == {}, "split them by concern"


def test_functions_are_short() -> None:
    long = {}
    for path in python_files(EVERYTHING):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long[f"{name_of(path)}:{node.lineno} {node.name}"] = lines
    assert long == {}, "split them by what they do"
