"""Run pip with a readable account of its progress, and never let it bring a CUDA build of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.pythons import SetupError

_POLL_S = 0.5
_REPORT_EVERY_S = 20.0
_STALL_S = 1800.0


def run_pip(python: Path, arguments: Sequence[str], *, log: Path, title: str, count: int = 0) -> None:
    """Run `python -m pip ARGUMENTS`; `count` is the number of packages that it will install, for the progress line.

    Everything pip prints goes to `log`. Raises SetupError with the end of the log if pip fails or stalls.
    """
    command = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore", "PYTHONUNBUFFERED": "1"}
    environment.pop("PIP_REQUIRE_VIRTUALENV", None)
    started = time.monotonic()
    with log.open("ab") as out:
        offset = out.seek(0, os.SEEK_END)
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, log, offset, title, count, started)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode != 0:
        _line(f"  {title}: failed", final=True)
        raise SetupError(f"pip could not {title} (whole log: {log}):\n{_tail(log, offset)}")
    _line(f"  {title}: done in {time.monotonic() - started:.0f} s", final=True)


def _watch(process: subprocess.Popen[bytes], log: Path, offset: int, title: str, count: int, started: float) -> None:
    reported, moved_at, seen = started, started, -1
    while process.poll() is None:
        time.sleep(_POLL_S)
        now = time.monotonic()
        size = log.stat().st_size
        if size != seen:
            seen, moved_at = size, now
        if now - moved_at > _STALL_S:
            raise SetupError(f"pip printed nothing for {_STALL_S:.0f} s while it was to {title} (log: {log})")
        if sys.stderr.isatty() or now - reported >= _REPORT_EVERY_S:
            reported = now
            _line(f"  {title}: {_stage(log, offset, count)}, {now - started:.0f} s", final=not sys.stderr.isatty())


def _stage(log: Path, offset: int, count: int) -> str:
    text = _read(log, offset)
    if "Installing collected packages" in text:
        return f"installing {count} packages" if count else "installing"
    fetched = text.count("\nCollecting ") + text.startswith("Collecting ")
    return f"fetched {fetched} of {count}" if count else "working"


def _read(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", errors="replace")


def _line(text: str, *, final: bool) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if final else "", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _tail(log: Path, offset: int, lines: int = 30) -> str:
    text = _read(log, offset)
    kept = [line for line in text.splitlines() if not line.startswith("WARNING: Location")]
    return "\n".join(kept[-lines:])


def refuse_cuda_torch(python: Path, requirement: str, *, log: Path) -> None:
    """Ask pip which torch it would install, and raise SetupError if that is a CUDA build; downloads metadata only."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        dry_run = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), requirement]
        run_pip(python, dry_run, log=log, title=f"look up {requirement}")
        found = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
    needs = [need for need in found.get("requires_dist", []) if need.lower().startswith(("nvidia", "cuda"))]
    if needs:
        raise SetupError(
            f"pip would install a CUDA build of {requirement} here (it wants {needs[0]} and others: gigabytes).\n"
            f"Make a CPU build visible to pip (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS) and run this again."
        )
