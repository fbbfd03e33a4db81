"""Make the Python environments of this repository.

    python3 -m tools.envs core                        the core environment, .venv
    python3 -m tools.envs vllm sglang megatron        engine environments, .envs/NAME
    python3 -m tools.envs clean                       remove this clone's environments (the cache stays)
    python3 -m tools.envs clean-cache                 remove the cached packages of all clones

An engine's third-party packages are big and conflict with other engines', so they are installed once per lock file into
the user's cache folder and shared by all clones. A clone's `.envs/NAME` is a small environment that sees them through a
`.pth` file and has this clone's core and adapter installed in editable form. Everything is made under a file lock, and
a marker is written last: what was interrupted is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.piprun import refuse_cuda_torch, run_pip
from tools.pythons import SetupError, find_python

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
RECIPE = 1
"""Counts changes of this program that make environments built by an earlier one unusable."""

_LOCK_TIMEOUT_S = 3600.0
_CHECK_TIMEOUT_S = 300.0
_ADAPTERS = ("vllm", "sglang", "megatron")
_CORE_CHECK = "import torch, nixl, zmq, msgspec, xxhash, tensorhub_core; assert torch.version.cuda is None"


@dataclass(frozen=True)
class Engine:
    """One engine's environment: `check` is run in the cached one, `scripts` are made in each clone's."""

    name: str
    check: str
    needed_bytes: int
    scripts: dict[str, str] = field(default_factory=dict)
    pythons: tuple[str, ...] = ("3.11",)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            check=(
                "import torch; assert torch.version.cuda is None\n"
                "import nixl, xxhash, zmq, msgspec, accelerate, gguf\n"
                "from vllm import LLM"
            ),
            needed_bytes=4 << 30,
            scripts={"vllm": "vllm.entrypoints.cli.main:main"},
        ),
        Engine(
            "sglang",
            # On a machine without CUDA SGLang needs stand-ins for its kernels, which are not packages: the tests'.
            check=(
                "import torch; assert torch.version.cuda is None\n"
                "import nixl, xxhash, zmq, msgspec, xgrammar\n"
                f"import os, sys; sys.path.insert(0, {str(ROOT / 'tests' / 'engines' / 'sglang' / 'shim')!r})\n"
                "os.environ.update(SGLANG_USE_CPU_ENGINE='1', TORCHDYNAMO_DISABLE='1')\n"
                "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler"
            ),
            needed_bytes=3 << 30,
        ),
        Engine(
            "megatron",
            check="import torch; assert torch.version.cuda is None\nimport nixl, xxhash, zmq, msgspec, megatron.core",
            needed_bytes=3 << 30,
        ),
    )
}


# --- files, locks, markers ------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder that all clones of this user share."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tensorhub" / "envs"


def requirements(lock: Path) -> list[str]:
    """Return the lock's lines without comments."""
    lines = (line.split("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the file lock at `path`; says so while another process holds it. Raises SetupError after an hour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        started, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not said:
                    print(f"waiting for another process that makes {what} ...", file=sys.stderr, flush=True)
                    said = True
                if time.monotonic() - started > _LOCK_TIMEOUT_S:
                    raise SetupError(f"another process has held {path} for an hour: is it stuck?") from None
                time.sleep(0.5)
        yield


def _marker(folder: Path) -> Path:
    return folder / "tensorhub-ready.json"


def is_ready(folder: Path, key: str) -> bool:
    """Tell whether `folder` was made whole, under this key."""
    try:
        return bool(json.loads(_marker(folder).read_text(encoding="utf-8"))["key"] == key)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def mark_ready(folder: Path, key: str) -> None:
    """Say that `folder` is whole; the last step of making it."""
    temporary = _marker(folder).with_suffix(".tmp")
    temporary.write_text(json.dumps({"key": key}), encoding="utf-8")
    temporary.replace(_marker(folder))


def _is_usable(folder: Path, key: str) -> bool:
    """Tell whether an environment was made whole and the interpreter that it was made from is still there."""
    return is_ready(folder, key) and (folder / "bin" / "python").exists()


def _require_space(folder: Path, needed_bytes: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise SetupError(f"{what} needs {needed_bytes / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free")


def _run(command: list[str], what: str) -> str:
    """Run a short command and return what it printed; raises SetupError with its output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, cwd="/", check=False)
    except subprocess.TimeoutExpired:
        raise SetupError(f"{what}: no end after {_CHECK_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise SetupError(f"{what}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def _make_venv(base: Path, folder: Path, *options: str) -> None:
    _run([str(base), "-m", "venv", *options, str(folder)], "python -m venv failed")


def _site_packages(python: Path) -> Path:
    return Path(_run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "find packages"))


def _install_lock(python: Path, lock: Path, log: Path) -> None:
    """Install torch first, then the rest of the lock, nothing else."""
    wanted = requirements(lock)
    torch = next(line for line in wanted if line.startswith("torch=="))
    refuse_cuda_torch(python, torch, log=log)
    run_pip(python, ["install", "--no-deps", torch], log=log, title="install torch", count=1)
    run_pip(python, ["install", "--no-deps", "-r", str(lock)], log=log, title="install packages", count=len(wanted))


# --- the core environment -------------------------------------------------------------------------------------------


def make_core() -> None:
    """Make `.venv`: the core lock, and all four distributions in editable form."""
    with locked(ROOT / ".envs" / "core.lock", "the core environment"):
        lock, folder = TOOLS / "locks" / "core.txt", ROOT / ".venv"
        packages_key = _hash(str(RECIPE), *requirements(lock), str(ROOT))
        projects = [ROOT, *(ROOT / "integrations" / name for name in _ADAPTERS)]
        key = _hash(packages_key, *(_read(project / "pyproject.toml") for project in projects))
        if _is_usable(folder, key):
            return
        python = folder / "bin" / "python"
        log = ROOT / ".envs" / "core.log"
        packages = folder / "lib"
        if not (is_ready(packages, packages_key) and python.exists()):
            base = find_python(("3.11", "3.12", "3.13"), "The core environment")
            print(f"making the core environment {folder} with {base}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            _require_space(ROOT, 3 << 30, "the core environment")
            log.unlink(missing_ok=True)
            _make_venv(base, folder)
            _install_lock(python, lock, log)
            mark_ready(packages, packages_key)
        _install_editable(python, python, projects, log)
        _run([str(python), "-m", "pip", "check"], "the core lock is not complete")
        _run([str(python), "-c", _CORE_CHECK], "the core environment does not work")
        mark_ready(folder, key)
        print(f"core environment ready: {python}", file=sys.stderr, flush=True)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _install_editable(runner: Path, target: Path, projects: list[Path], log: Path) -> None:
    """Install this repository's distributions into `target`, with the pip of `runner`, from what is here only."""
    options = ["install", "--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall"]
    editables = [part for project in projects for part in ("-e", str(project))]
    where = [] if runner == target else ["--python", str(target)]
    run_pip(runner, [*where, *options, *editables], log=log, title="install this repository", count=len(projects))


# --- engines --------------------------------------------------------------------------------------------------------


def make_engine(engine: Engine) -> None:
    """Make `.envs/NAME`, and the cached packages it needs unless another clone did."""
    with locked(ROOT / ".envs" / f"{engine.name}.lock", f"the {engine.name} environment"):
        cached = _make_cached(engine)
        projects = [ROOT, ROOT / "integrations" / engine.name]
        key = _hash(str(cached), str(ROOT), *(_read(project / "pyproject.toml") for project in projects))
        folder = ROOT / ".envs" / engine.name
        if _is_usable(folder, key):
            return
        shutil.rmtree(folder, ignore_errors=True)
        _make_venv(cached / "bin" / "python", folder, "--without-pip")
        python = folder / "bin" / "python"
        link = _site_packages(python) / "tensorhub_cached_packages.pth"
        link.write_text(f"{_site_packages(cached / 'bin' / 'python')}\n", encoding="utf-8")
        _install_editable(cached / "bin" / "python", python, projects, ROOT / ".envs" / f"{engine.name}.log")
        for script, target in engine.scripts.items():
            _write_script(folder / "bin" / script, python, target)
        adapter = f"import tensorhub_core, tensorhub_{engine.name}"
        _run([str(python), "-c", adapter], f"the {engine.name} environment does not work")
        mark_ready(folder, key)
        print(f"{engine.name} environment ready: {python}", file=sys.stderr, flush=True)


def _make_cached(engine: Engine) -> Path:
    """Return the cached environment with the engine's third-party packages; builds it if nobody did yet."""
    lock = TOOLS / "locks" / f"{engine.name}.txt"
    stubs = sorted((TOOLS / "stubs" / engine.name).glob("METADATA"))
    key = _hash(str(RECIPE), *requirements(lock), *(_read(stub) for stub in stubs), *engine.pythons, platform.machine())
    folder = cache_folder() / f"{engine.name}-{key}"
    if _is_usable(folder, key):
        return folder
    with locked(folder.with_suffix(".lock"), f"the packages for {engine.name}"):
        if _is_usable(folder, key):
            return folder
        base = find_python(engine.pythons, f"The {engine.name} environment")
        _require_space(folder.parent, engine.needed_bytes, f"the {engine.name} environment")
        print(f"making {folder} with {base}: this happens once, and takes some minutes", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        log.unlink(missing_ok=True)
        _make_venv(base, folder)
        python = folder / "bin" / "python"
        _install_lock(python, lock, log)
        for stub in stubs:
            _install_stub(stub, _site_packages(python))
        print("  check that it works", file=sys.stderr, flush=True)
        _run([str(python), "-c", engine.check], f"the {engine.name} packages do not work together")
        mark_ready(folder, key)
    return folder


def _install_stub(metadata: Path, site_packages: Path) -> None:
    """Write a distribution that has metadata and no code."""
    fields = dict(line.split(": ", 1) for line in _read(metadata).splitlines() if ": " in line)
    folder = site_packages / f"{fields['Name']}-{fields['Version']}.dist-info"
    folder.mkdir()
    shutil.copyfile(metadata, folder / "METADATA")
    (folder / "INSTALLER").write_text("tensorhub\n", encoding="utf-8")
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names), encoding="utf-8")


def _write_script(path: Path, python: Path, target: str) -> None:
    """Write a console script that runs `target` (module:function) with the clone's interpreter.

    Through sh, because a path with spaces, or a long one, does not work after `#!`.
    """
    module, function = target.split(":")
    path.write_text(
        f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
        f"import sys\n\nfrom {module} import {function}\n\n"
        f'if __name__ == "__main__":\n    sys.exit({function}())\n',
        encoding="utf-8",
    )
    path.chmod(0o755)


# --- command line ---------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Make the named environments; returns the exit code."""
    unknown = [name for name in arguments if name not in ("core", "clean", "clean-cache", *ENGINES)]
    if unknown or not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for name in arguments:
            if name == "core":
                make_core()
            elif name == "clean":
                shutil.rmtree(ROOT / ".venv", ignore_errors=True)
                shutil.rmtree(ROOT / ".envs", ignore_errors=True)
            elif name == "clean-cache":
                shutil.rmtree(cache_folder(), ignore_errors=True)
            else:
                make_engine(ENGINES[name])
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: run it again, what is half made will be made again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
