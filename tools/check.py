"""Run the checks of this repository, and say at the end which failed.

    python -m tools.check                 every phase
    python -m tools.check mypy unit       some of them

Phases of one lane run one after the other, the lanes side by side: engines wait more than they compute. What has short
leases and deadlines comes before the others: beside them it would meet those on a slow machine. What only computes,
under no clock, takes at the lowest priority what all of them leave of the processors.
A failing phase does not keep the others from running; the exit code is 1 if any failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
CORE = ".venv/bin"
VLLM = ".envs/vllm/bin"
SGLANG = ".envs/sglang/bin"
MEGATRON = ".envs/megatron/bin"
RESULTS = ROOT / ".work" / "results"
POLL_S = 0.1
LAST_WORDS_S = 10.0
"""How long what reached its limit has to say where it stood (pytest's fault handler does so)."""
MOST_NAMED = 10
LOWEST = 19
"""The niceness of what takes only what others leave."""

PURE = ("tests/walk", "tests/sim", "tests/property")
"""Tests that only compute: the exhaustive walk, worlds under a virtual clock, properties."""
ALONE = ("tests/processes", "tests/transport", "tests/readme", "tests/engines", *PURE)
"""They and tests with real processes and engines: phases of their own."""


@dataclass(frozen=True)
class Phase:
    """One command; a `tests` phase is a pytest run whose tests are counted, any other counts as one check."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    tests: bool = False
    lane: str = "core"


FIRST = "first"
"""The lane that runs before the others."""
SPARE = "spare"
"""The lane that runs beside all others, at the lowest priority."""


def _pytest(name: str, python: str, *arguments: str, limit_s: float, lane: str = "core") -> Phase:
    # A worker that crashed is not replaced: pytest-xdist may wait for the new one for ever.
    ends = ("--max-worker-restart=0",) if "-n" in arguments else ()
    command = (python, "-m", "pytest", "-q", "--durations=5", *ends, *arguments)
    return Phase(name, command, limit_s, tests=True, lane=lane)


PHASES = (
    # More workers than cores, for they wait most of the time; in the order of tests/processes/conftest.py.
    _pytest(
        *("processes", f"{CORE}/python", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"),
        *("tests/processes", "tests/transport"),
        limit_s=1500,
        lane=FIRST,
    ),
    _pytest("readme", f"{CORE}/python", "tests/readme", limit_s=300, lane=FIRST),
    Phase("ruff", (f"{CORE}/ruff", "check", "."), 120),
    Phase("format", (f"{CORE}/ruff", "format", "--check", "."), 120),
    Phase("mypy", (f"{CORE}/mypy",), 600),
    Phase("imports", (f"{CORE}/lint-imports", "--cache-dir", ".work/imports"), 300),
    _pytest("unit", f"{CORE}/python", "-n", "2", "tests", *(f"--ignore={path}" for path in ALONE), limit_s=1800),
    _pytest("pure", f"{CORE}/python", "-n", "2", "--timeout=600", *PURE, limit_s=2700, lane=SPARE),
    _pytest("vllm", f"{VLLM}/python", "tests/engines/vllm", limit_s=1500, lane="engines"),
    _pytest(
        *("sglang", f"{SGLANG}/python", "tests/engines/sglang"),
        "--ignore=tests/engines/sglang/test_command.py",  # make nightly-sglang
        limit_s=1200,
        lane="engines",
    ),
    _pytest("megatron", f"{MEGATRON}/python", "tests/engines/megatron", limit_s=900, lane="engines"),
    Phase("demo-quick", (f"{VLLM}/python", "demo/run.py", "--quick"), 600, lane="engines"),
    Phase("demo-megatron", (f"{VLLM}/python", "demo/run.py", "--megatron", "--quick"), 600, lane="engines"),
    Phase("demo-sglang", (f"{VLLM}/python", "demo/run.py", "--sglang", "--quick"), 600, lane="engines"),
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
    where: tuple[str, ...] = ()
    """The tests that failed; of a phase that was not done, where its tests stood."""


class Running:
    """A phase that runs, in a process group of its own; with `log` its output goes there, else to the terminal."""

    def __init__(self, phase: Phase, log: Path | None = None) -> None:
        self.phase, self._log = phase, log
        self._report = RESULTS / f"{phase.name}.xml"
        self._report.unlink(missing_ok=True)
        self._started_s = time.monotonic()
        self._why, self._process = "", None
        said = f" (its output comes at its end, and goes to {os.path.relpath(log)})" if log else ""
        print(f"\n=== {phase.name}: {' '.join(phase.command)}{said}", flush=True)
        command = [str(ROOT / phase.command[0]), *phase.command[1:]]
        if phase.tests:
            command.append(f"--junitxml={self._report}")
        with log.open("wb") if log else contextlib.nullcontext() as output:
            self._process = self._start(command, output)

    def _start(self, command: list[str], output: IO[bytes] | None) -> subprocess.Popen[bytes] | None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}
        environment.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")
        errors = subprocess.STDOUT if output else None
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=errors
            )
            if self.phase.lane == SPARE:
                os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST)
            return process
        except OSError as error:
            self._why = f"could not start: {error}"
            return None

    def outcome(self) -> Outcome | None:
        """Return what it came to, or None as long as it runs; ends it at its limit."""
        took_s = time.monotonic() - self._started_s
        if self._process is not None:
            code = self._process.poll()
            if code is None and took_s < self.phase.limit_s:
                return None
            if code is None:
                self._why = f"not done after {self.phase.limit_s:.0f} s"
                _ask_where_it_stands(self._process)
            elif code:
                self._why = f"exit code {code}"
            self.end()
        if self._log is not None and self._log.exists():
            print(f"\n=== {self.phase.name}: its output", flush=True)
            with self._log.open("rb") as log:
                shutil.copyfileobj(log, sys.stdout.buffer)
            sys.stdout.flush()
        return self._judge(took_s)

    def _judge(self, took_s: float) -> Outcome:
        why, tests = self._why, self.phase.tests
        passed, failed, skipped = _count(self._report) if tests else (int(not why), int(bool(why)), 0)
        if tests and not why and passed == 0:
            why = "no test ran"
        where = _named(self._report) if tests else ()
        if not where and self._why and self._log is not None and self._log.exists():
            where = _stood(self._log.read_text(errors="replace"))
        return Outcome(self.phase, passed, max(failed, int(bool(why))), skipped, took_s, why, where)

    def end(self) -> None:
        """End it with all that it left running in its group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _count(report: Path) -> tuple[int, int, int]:
    """Return how many tests of a pytest report passed, failed, were skipped."""
    if not report.exists():
        return 0, 0, 0
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    return max(0, total - failures - errors - skipped), failures + errors, skipped


def _ask_where_it_stands(process: subprocess.Popen[bytes]) -> None:
    """Let each of its processes say where it stands, as pytest's fault handler does before it dies.

    One after the other: what two say at a time cannot be read.
    """
    deadline = time.monotonic() + LAST_WORDS_S
    with contextlib.suppress(psutil.Error):
        above = psutil.Process(process.pid)
        for each in [*above.children(recursive=True), above]:
            with contextlib.suppress(psutil.Error):
                each.send_signal(signal.SIGABRT)
                each.wait(max(0.0, min(1.0, deadline - time.monotonic())))


def _named(report: Path) -> tuple[str, ...]:
    """Return the names of the tests that failed, of a pytest report."""
    if not report.exists():
        return ()
    cases = ElementTree.parse(report).getroot().iter("testcase")
    failed = (case for case in cases if case.find("failure") is not None or case.find("error") is not None)
    return tuple(f"{case.get('classname')}::{case.get('name')}" for case in failed)


def _stood(log: str) -> tuple[str, ...]:
    """Return the lines of tests that the fault handler's stacks in a log lead through."""
    found = re.findall(r'^ +File "[^"]*?(tests/[^"]+)", line (\d+) in (\w+)$', log, re.MULTILINE)
    return tuple(dict.fromkeys(f"{path}:{line} {function}" for path, line, function in found))


def run(phases: Sequence[Phase]) -> list[Outcome]:
    """Run phases in the repository's root; returns the outcomes, those of `FIRST` first.

    The lanes run side by side, all but `SPARE` after `FIRST`. With one lane, output goes straight to the terminal; with
    several, a phase's whole output comes when it ends.
    """
    lanes: dict[str, deque[Phase]] = {}
    for phase in phases:
        lanes.setdefault(phase.lane, deque()).append(phase)
    running: dict[str, Running] = {}
    outcomes: dict[str, Outcome] = {}
    try:
        while len(outcomes) < len(phases):
            at_first = bool(lanes.get(FIRST)) or FIRST in running
            for lane, waiting in lanes.items():
                if lane not in running and waiting and (lane in (FIRST, SPARE) or not at_first):
                    phase = waiting.popleft()
                    running[lane] = Running(phase, RESULTS / f"{phase.name}.log" if len(lanes) > 1 else None)
                outcome = running[lane].outcome() if lane in running else None
                if outcome is not None:
                    del running[lane]
                    outcomes[outcome.phase.name] = outcome
            time.sleep(POLL_S)
    finally:
        for each in running.values():
            each.end()
    return [outcomes[phase.name] for phase in sorted(phases, key=lambda phase: phase.lane != FIRST)]


def main(names: list[str]) -> int:
    """Run the named phases, or all; returns the exit code."""
    known = {phase.name: phase for phase in PHASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown phase {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the phases are ended too
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    RESULTS.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    outcomes = run([phase for phase in PHASES if not names or phase.name in names])
    print("\n=== summary")
    for outcome in outcomes:
        verdict = f"FAILED ({outcome.why})" if outcome.why else "ok"
        counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        print(f"  {outcome.phase.name:<13} {outcome.took_s:7.1f} s  {counts:<36} {verdict}")
    for outcome in outcomes:
        for name in outcome.where[:MOST_NAMED]:
            print(f"  {outcome.phase.name}: {name}")
    passed, failed, skipped = (
        sum(getattr(outcome, key) for outcome in outcomes) for key in ("passed", "failed", "skipped")
    )
    print(f"{time.monotonic() - started_s:.0f} s in all", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
