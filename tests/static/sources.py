"""The Python files of this repository, as the static tests see them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("src", "integrations")
EVERYTHING = (*PRODUCT, "tools", "tests", "demo", "bench")


def python_files(folders: tuple[str, ...]) -> list[Path]:
    """Return the Python files below `folders`, sorted."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    """Return the path inside the repository, for test ids and messages."""
    return str(path.relative_to(ROOT))
