"""What SGLang's releases define in the modules that the adapter touches: names and parameters, without any code.

    python -m tests.unit.sglang.releases FOLDER VERSION      # FOLDER: the unpacked wheel's `sglang`

writes `releases/VERSION.json`, which `test_releases.py` holds the adapter's plug-in points against.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorhub_sglang.plug_points import PLUG_POINTS

FOLDER = Path(__file__).parent / "releases"


def outlines(package: Path) -> dict[str, str]:
    """Return the outline of every module that has a plug-in point, by the module's name."""
    found = {}
    for module in sorted({point.module for point in PLUG_POINTS}):
        base = package.joinpath(*module.split(".")[1:])
        path = next(path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file())
        found[module] = "\n".join(_outline(ast.parse(path.read_text(encoding="utf-8")).body, ""))
    return found


def unpack(version: str, folder: Path) -> Path:
    """Write a release's outlines as a package into `folder`; return the package's folder."""
    for module, text in json.loads((FOLDER / f"{version}.json").read_text(encoding="utf-8")).items():
        path = folder.joinpath(*module.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(text, encoding="utf-8")
    return folder / "sglang"


def _outline(body: Sequence[ast.stmt], indent: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield f"{indent}class {node.name}:"
            yield from list(_outline(node.body, indent + " ")) or [f"{indent} ..."]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            yield f"{indent}def {node.name}({', '.join(names)}): ..."
        elif isinstance(node, ast.If | ast.Try):
            yield from _outline([*node.body, *node.orelse], indent)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (f"{indent}{target.id} = 0" for target in targets if isinstance(target, ast.Name))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(outlines(Path(sys.argv[1])), indent=0, sort_keys=True)
    (FOLDER / f"{sys.argv[2]}.json").write_text(text + "\n", encoding="utf-8")
