"""The check of an SGLang installation sees exactly what is missing, and a start that needs it is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tensorhub_sglang.plug_points import PLUG_POINTS, PlugPoint, find_problems
from tensorhub_sglang.plugin import is_wanted


def write_package(folder: Path, points: tuple[PlugPoint, ...]) -> Path:
    """Write a package `sglang` that has these plug-in points and nothing else."""
    root = folder / "sglang"
    root.mkdir(parents=True)
    (root / "__init__.py").touch()
    modules: dict[str, dict[str, list[PlugPoint]]] = {}
    for point in points:
        modules.setdefault(point.module, {}).setdefault(point.name.split(".")[0], []).append(point)
    for module, names in modules.items():
        path = root.joinpath(*module.split(".")[1:])
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text("\n".join(_define(name, found) for name, found in names.items()))
    return root


def _define(name: str, points: list[PlugPoint]) -> str:
    members = [(point.name.split(".")[1], point.parameters) for point in points if "." in point.name]
    if not members:
        return f"def {name}({', '.join(points[0].parameters)}): ...\n"
    lines = [f"    def {member}(self, {', '.join(parameters)}): ..." for member, parameters in members]
    return "\n".join([f"class {name}:", *lines, ""])


def test_a_package_with_every_plug_point_suits(tmp_path: Path) -> None:
    assert find_problems(write_package(tmp_path, PLUG_POINTS)) == ()


@pytest.mark.parametrize("missing", PLUG_POINTS, ids=lambda point: f"{point.module}.{point.name}")
def test_each_missing_plug_point_is_named(tmp_path: Path, missing: PlugPoint) -> None:
    there = tuple(point for point in PLUG_POINTS if point is not missing)
    problems = find_problems(write_package(tmp_path, there))
    assert len(problems) == 1
    assert problems[0].startswith(f"{missing.module}.{missing.name} ({missing.purpose}): ")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class A:\n    def f(self, x, y): ...", ""),
        ("class A:\n    async def f(self, y, *, x): ...", ""),
        ("try:\n    class A:\n        def f(self, x, y): ...\nexcept ImportError:\n    A = None", ""),
        ("class A:\n    def f(self, x, y): ...\nA = rebuild(A)", ""),
        ("class A:\n    def f(self, x): ...", "takes no parameter y"),
        ("class A:\n    f = 3", "not a function"),
        ("class A: ...", "f is not defined"),
        ("def A(): ...", "f is not defined"),
        ("from b import A", "A is not defined"),
        ("def broken(", "cannot be read"),
    ],
)
def test_definitions_are_read_as_python_reads_them(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "m.py").write_text(source)
    problems = find_problems(tmp_path, [PlugPoint("sglang.m", "A.f", "a test", ("x", "y"))])
    assert [problem in line for line in problems] == ([True] if problem else [])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--weight-source", "tensorhub"], True),
        (["--port", "1", "--weight-source=tensorhub"], True),
        (["--weight-source", "disk", "tensorhub"], False),
        (["--weight-source"], False),
        ([], False),
    ],
)
def test_only_a_start_that_asks_for_it_is_concerned(arguments: list[str], wanted: bool) -> None:
    assert is_wanted(arguments) is wanted


def start(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point in a process of its own, as SGLang does: what a plug-in raises is logged and dropped."""
    program = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); sys.argv[1:] = {list(arguments)!r}\n"
        "from tensorhub_sglang.plugin import register\n"
        "try:\n    register()\nexcept Exception as error:\n    print('dropped', error)\n"
        "print('started')\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)


def test_a_start_on_an_unsuitable_sglang_is_refused_with_the_reason(tmp_path: Path) -> None:
    done = start(write_package(tmp_path, PLUG_POINTS[1:]), "--weight-source", "tensorhub")
    assert done.returncode == 1
    assert "started" not in done.stdout
    assert "sglang.srt.plugins.load_plugins (runs plug-ins in every process)" in done.stderr


def test_a_start_on_an_sglang_that_cannot_be_hooked_is_refused_with_the_reason(tmp_path: Path) -> None:
    done = start(write_package(tmp_path, PLUG_POINTS), "--weight-source=tensorhub")  # its functions do nothing
    assert done.returncode == 1
    assert "started" not in done.stdout
    assert "--weight-source tensorhub: SGLang unknown does not suit: " in done.stderr


def test_any_other_start_goes_on(tmp_path: Path) -> None:
    done = start(write_package(tmp_path, ()), "--port", "30000")
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
