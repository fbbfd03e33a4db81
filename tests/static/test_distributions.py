"""The distributions work where nothing but what they declare is installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.static.sources import ROOT

INTEGRATIONS = ("vllm", "sglang", "megatron")
NEEDS_TORCH = "tensorhub_core.engine."
"""Modules that run inside an engine: torch is there, and core does not declare it."""

IMPORT_ALL = f"""
import importlib, pkgutil, sys
import tensorhub_core
names = [m.name for m in pkgutil.walk_packages(tensorhub_core.__path__, "tensorhub_core.")]
for name in names:
    try:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name == "torch" and name.startswith({NEEDS_TORCH!r})):
            raise
print(len(names), tensorhub_core.__file__)
print(*sorted({{"torch", "nixl", "transformers"}} & set(sys.modules)))
"""


def build(project: Path, kind: str, out: Path) -> Path:
    """Build a wheel or sdist of `project` into `out` and return it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=60)
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def declared_distributions(name: str) -> set[str]:
    """Return the distributions that `name` needs, without extras, down to the last."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for line in importlib.metadata.requires(waiting.pop()) or ():
            need = Requirement(line)
            key = canonicalize_name(need.name)
            if (need.marker is None or need.marker.evaluate({"extra": ""})) and key not in found:
                found.add(key)
                waiting.append(key)
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the built core wheel, what it declares, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=60)
    python = folder / "env" / "bin" / "python"
    (site_packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    for name in declared_distributions("tensorhub-core"):
        link_distribution(name, site_packages)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    wheel = build(ROOT, "wheel", folder)
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=60)
    return python


def link_distribution(name: str, site_packages: Path) -> None:
    """Make an installed distribution visible in another environment."""
    distribution = importlib.metadata.distribution(name)
    tops = {Path(str(file)).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    for top in tops:
        target = site_packages / top
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(top))))


def test_every_core_module_imports_with_only_what_is_declared(bare_python: Path) -> None:
    done = subprocess.run(
        [str(bare_python), "-I", "-c", IMPORT_ALL], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    count, where = done.stdout.splitlines()[0].split()
    assert int(count) > 30
    assert Path(where).is_relative_to(bare_python.parents[1])
    assert done.stdout.splitlines()[1].split() == [], "importing core must not need a heavy package"


def test_the_command_starts_with_only_what_is_declared(bare_python: Path) -> None:
    command = [str(bare_python.parent / "tensorhub"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("serve", "status", "publish", "pull", "doctor", "demo"):
        assert name in done.stdout


def test_the_wheel_holds_the_package_its_types_and_its_license(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(ROOT, "wheel", tmp_path)) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tensorhub_core"}
    assert "tensorhub_core/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_sdist_leaves_the_integrations_out(tmp_path: Path) -> None:
    with tarfile.open(build(ROOT, "sdist", tmp_path)) as archive:
        tops = {Path(*Path(name).parts[1:2]).name for name in archive.getnames()}
    assert {"src", "LICENSE", "README.md", "pyproject.toml"} <= tops
    assert tops.isdisjoint({"integrations", "tests", "tools", "docs"})


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_an_integration_needs_core_and_not_its_engine(name: str, tmp_path: Path) -> None:
    wheel = build(ROOT / "integrations" / name, "wheel", tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        packages = {item.split("/")[0] for item in archive.namelist() if not item.split("/")[0].endswith(".dist-info")}
        (metadata,) = (item for item in archive.namelist() if item.endswith("METADATA"))
        text = archive.read(metadata).decode()
    assert packages == {f"tensorhub_{name}"}
    needs = [Requirement(line.split(": ", 1)[1]).name for line in text.splitlines() if line.startswith("Requires-Dist")]
    assert needs == ["tensorhub-core"]
