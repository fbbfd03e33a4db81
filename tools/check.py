"""Run the checks of this repository, one phase after the other, and say at the end which failed.

    python -m tools.check                 every phase
    python -m tools.check mypy unit       some of them

A failing phase does not keep the later ones from running; the exit code is 1 if any failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ".venv/bin"
VLLM = ".envs/vllm/bin"
RESULTS = ROOT / ".work" / "results"

ALONE = ("tests/processes", "tests/transport", "tests/readme", "tests/engines", "tests/walk")
"""Tests with real processes and engines, which run one at a time, and the exhaustive walk: phases of their own."""


@dataclass(frozen=True)
class Phase:
    """One command; a `tests` phase is a pytest run whose tests are counted, any other counts as one check."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    tests: bool = False


def _pytest(name: str, python: str, *arguments: str, limit_s: float) -> Phase:
    return Phase(name, (python, "-m", "pytest", "-q", "--durations=5", *arguments), limit_s, tests=True)


PHASES = (
    Phase("ruff", (f"{CORE}/ruff", "check", "."), 120),
    Phase("format", (f"{CORE}/ruff", "format", "--check", "."), 120),
    Phase("mypy", (f"{CORE}/mypy",), 600),
    Phase("imports", (f"{CORE}/lint-imports", "--cache-dir", ".work/imports"), 300),
    _pytest("unit", f"{CORE}/python", "-n", "2", "tests", *(f"--ignore={path}" for path in ALONE), limit_s=900),
    _pytest("walk", f"{CORE}/python", "-n", "2", "tests/walk", limit_s=900),
    _pytest(
        *("processes", f"{CORE}/python", "-n", "2", "--dist", "loadfile", "tests/processes", "tests/transport"),
        limit_s=1500,
    ),
    _pytest("readme", f"{CORE}/python", "tests/readme", limit_s=300),
    _pytest("vllm", f"{VLLM}/python", "tests/engines/vllm", limit_s=1500),
    Phase("demo-quick", (f"{VLLM}/python", "demo/run.py", "--quick"), 600),
)


@dataclass(frozen=True)
class Outcome:
    """What a phase came to."""

    phase: Phase
    passed: int
    failed: int
    skipped: int
    took_s: float
    why: str


def run_phase(phase: Phase) -> Outcome:
    """Run one phase in the repository's root; its output goes straight to the terminal."""
    print(f"\n=== {phase.name}: {' '.join(phase.command)}", flush=True)
    report = RESULTS / f"{phase.name}.xml"
    report.unlink(missing_ok=True)
    command = [str(ROOT / phase.command[0]), *phase.command[1:]]
    if phase.tests:
        command.append(f"--junitxml={report}")
    started = time.monotonic()
    why = _run(command, phase.limit_s)
    took_s = time.monotonic() - started
    passed, failed, skipped = _count(report) if phase.tests else (int(not why), int(bool(why)), 0)
    if phase.tests and not why and passed == 0:
        why = "no test ran"
    return Outcome(phase, passed, max(failed, int(bool(why))), skipped, took_s, why)


def _run(command: list[str], limit_s: float) -> str:
    """Run a command in a process group of its own; return why it failed, or an empty string."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
    environment.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    except OSError as error:
        return f"could not start: {error}"
    try:
        code = process.wait(timeout=limit_s)
        return "" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what the command left running in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _count(report: Path) -> tuple[int, int, int]:
    """Return how many tests of a pytest report passed, failed, were skipped."""
    if not report.exists():
        return 0, 0, 0
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return max(0, total - failures - errors - skipped), failures + errors, skipped


def main(names: list[str]) -> int:
    """Run the named phases, or all; returns the exit code."""
    known = {phase.name: phase for phase in PHASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown phase {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the phase is ended too
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcomes = [run_phase(phase) for phase in PHASES if not names or phase.name in names]
    print("\n=== summary")
    for outcome in outcomes:
        verdict = f"FAILED ({outcome.why})" if outcome.why else "ok"
        counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        print(f"  {outcome.phase.name:<12} {outcome.took_s:7.1f} s  {counts:<36} {verdict}")
    passed, failed, skipped = (
        sum(getattr(outcome, key) for outcome in outcomes) for key in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
