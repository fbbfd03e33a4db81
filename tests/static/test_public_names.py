"""The public names that type checkers see are the ones that exist, and all of them."""

from __future__ import annotations

import ast
import inspect

import tensorhub_core


def test_typed_names_are_the_public_ones() -> None:
    tree = ast.parse(inspect.getsource(tensorhub_core))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(typed) == sorted(tensorhub_core.__all__) == sorted(tensorhub_core._PLACES)
    for name, module in typed.items():
        found = getattr(tensorhub_core, name)
        assert inspect.getmodule(found).__name__ == module, name


def test_every_public_name_explains_itself() -> None:
    for name in tensorhub_core.__all__:
        assert (inspect.getdoc(getattr(tensorhub_core, name)) or "").strip(), name
