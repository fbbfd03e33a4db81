"""Read the marked code blocks of a page, and do what they say.

A fenced block's info string says what it is: `python file=NAME` is written to a file of that name, `sh run` is run in
the folder of those files until it ends, `sh background` is started and runs until the page ends. A `text expect` block
after one of them shows what it prints: numbers may differ, and other lines may come between.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^```(?P<language>\w*)(?P<marks>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_POLL_S = 0.2


@dataclass
class Step:
    """One block to run, and what it should print."""

    script: str
    background: bool
    expected: list[str] = field(default_factory=list)


@dataclass
class Page:
    """The files and steps of a page, in order."""

    files: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


def read_page(text: str) -> Page:
    """Return what a page's marked blocks say."""
    page = Page()
    for block in _BLOCK.finditer(text):
        marks = block["marks"].split()
        named = [mark.removeprefix("file=") for mark in marks if mark.startswith("file=")]
        if named:
            page.files[named[0]] = block["body"]
        elif "run" in marks or "background" in marks:
            page.steps.append(Step(block["body"], "background" in marks))
        elif "expect" in marks:
            page.steps[-1].expected.extend(line for line in block["body"].splitlines() if line.strip())
    return page


def named_blocks(text: str) -> dict[str, str]:
    """Return the blocks that a page marks `name=NAME`, for tests that supply what they take for granted."""
    found: dict[str, str] = {}
    for block in _BLOCK.finditer(text):
        for mark in block["marks"].split():
            if mark.startswith("name="):
                assert mark.removeprefix("name=") not in found, f"{mark} twice"
                found[mark.removeprefix("name=")] = block["body"]
    return found


def run_block(block: str, folder: Path, **given: object) -> dict[str, object]:
    """Run a Python block as a file in `folder`, with some names given; returns what all names mean at its end."""
    file = folder / "block.py"
    file.write_text(block, encoding="utf-8")
    return runpy.run_path(str(file), given)


def pattern_of(line: str) -> str:
    """Return a line with all numbers, and all runs of blanks, made equal."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:[.,]\d+)*", "#", line)).strip()


def missing_lines(expected: list[str], printed: str) -> list[str]:
    """Return the expected lines that were not printed, looking for them in order."""
    waiting = [pattern_of(line) for line in printed.splitlines()]
    missing = []
    for line in expected:
        wanted = pattern_of(line)
        if wanted in waiting:
            waiting = waiting[waiting.index(wanted) + 1 :]
        else:
            missing.append(line)
    return missing


def play(page: Page, folder: Path, environment: dict[str, str], limit_s: float) -> None:
    """Write the page's files into `folder` and take its steps; raises AssertionError if one does not do as shown."""
    for name, text in page.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    with contextlib.ExitStack() as running:
        for number, step in enumerate(page.steps):
            output = folder / f"output-{number}.txt"
            deadline = time.monotonic() + limit_s
            if step.background:
                process = running.enter_context(started(step.script, folder, environment, output))
                _wait_for_lines(step, process, output, deadline)
            else:
                _run_until_right(step, folder, environment, output, deadline)


@contextlib.contextmanager
def started(script: str, folder: Path, environment: dict[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in a process group of its own, which is ended on exit."""
    with output.open("wb") as out:
        command = ["bash", "-e", "-o", "pipefail", "-c", script]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_lines(step: Step, process: subprocess.Popen[bytes], output: Path, deadline: float) -> None:
    while missing_lines(step.expected, output.read_text(errors="replace")):
        assert process.poll() is None, f"it ended: {step.script}\n{output.read_text(errors='replace')}"
        assert time.monotonic() < deadline, f"too late: {step.script}\n{output.read_text(errors='replace')}"
        time.sleep(_POLL_S)


def _run_until_right(step: Step, folder: Path, environment: dict[str, str], output: Path, deadline: float) -> None:
    """Run a step until it prints what it should: it may show a state that is about to be reached."""
    while True:
        with started(step.script, folder, environment, output) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            code = process.poll()
        printed = output.read_text(errors="replace")
        missing = missing_lines(step.expected, printed)
        if code == 0 and not missing:
            return
        assert not code, f"exit code {code}: {step.script}\n{printed}"
        why = "not done" if code is None else "not printed by"
        assert time.monotonic() < deadline, f"{why} {step.script}: {missing}\n{printed}"
        time.sleep(_POLL_S)
