"""Find the interpreter an environment is made from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PROBE = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
_PROBE_TIMEOUT_S = 30


class SetupError(Exception):
    """An environment cannot be made on this machine; the text says what is missing."""


def find_python(versions: tuple[str, ...], wanted_by: str) -> Path:
    """Return a working interpreter of the first of `versions` that this machine has.

    The variable SETUP_PYTHON names one outright. Raises SetupError, which says what to install.
    """
    named = os.environ.get("SETUP_PYTHON")
    if named and _version_of(Path(named)) in versions:
        return Path(named)
    for version in versions:
        for candidate in _candidates(version):
            if _version_of(candidate) == version:
                return candidate
    listed = " or ".join(versions)
    raise SetupError(
        f"{wanted_by} needs Python {listed} with its venv module, and this machine has none.\n"
        f"Install python{versions[0]} and python{versions[0]}-venv (or a pyenv version), "
        f"or set SETUP_PYTHON to such an interpreter."
    )


def _candidates(version: str) -> list[Path]:
    found = [Path(sys.executable)] if sys.version_info[:2] == _parse(version) else []
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        candidate = Path(folder or ".") / f"python{version}"
        if os.access(candidate, os.X_OK):
            found.append(candidate)
    return found


def _parse(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _version_of(python: Path) -> str | None:
    """Return the interpreter's version, or None if it does not run or cannot make environments."""
    try:
        probe = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return probe.stdout.strip() if probe.returncode == 0 else None
