"""Start the demo's programs and end them for certain: each in a process group of its own, with a log file.

Groups are ended in three ways: in order by `Children.close()`, by its exit hook, and by a watcher (watcher.py) if this
process is killed outright.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil  # type: ignore[import-untyped]

_STOP_S = 20.0
_LOOK_EVERY_S = 0.1
_TAIL_LINES = 15
_MOST_CAUSES = 5
_CAUSE = re.compile(r"\b[A-Z]\w*(Error|Exception|Exceeded|Unreachable|Mismatch|Conflict|Unavailable)\b: ")
_PR_SET_CHILD_SUBREAPER = 36


class DemoError(Exception):
    """The demo cannot go on; the text says what went wrong and where to read more."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended, so that none of them can slip away (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Process(Protocol):
    """What is asked of a program's process: Popen has it."""

    stdin: IO[bytes] | None

    @property
    def pid(self) -> int:
        """Return its process id, which is also that of its group."""

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""

    def wait(self, timeout: float) -> int:
        """Return its exit code; raises subprocess.TimeoutExpired."""


class Child:
    """One program: the leader of its own process group, writing to `log`."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def group(self) -> int:
        """Return the process group, which is also the program's process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise DemoError if the program has ended."""
        code = self._process.poll()
        if code is not None:
            raise DemoError(f"{self.name} ended with code {code}; the end of {self.log}:\n{self.tail()}")

    def text(self) -> str:
        """Return the whole log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        """Return the last lines of the log, after the first ones above them that name an error."""
        lines = self.text().splitlines()
        # An engine tells of its workers' errors first, and ends with pages about its own.
        causes = [line for line in lines[:-_TAIL_LINES] if _CAUSE.search(line)][:_MOST_CAUSES]
        dots = ["..."] if causes else []
        return "\n".join("    " + line for line in [*causes, *dots, *lines[-_TAIL_LINES:]])

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raises DemoError at the deadline."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.name} was not done after {timeout_s:.0f} s:\n{self.tail()}") from None

    def tell(self, line: str) -> None:
        """Write a line to the program's input; raises DemoError if it does not read any more."""
        assert self._process.stdin is not None, "started without an input"
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            self.check()
            raise DemoError(f"{self.name} does not listen any more:\n{self.tail()}") from None

    def end_input(self) -> None:
        """Close the program's input."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, if it still is there."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def alive(self) -> bool:
        """Tell whether any process of the group still runs."""
        self._process.poll()  # reaps the leader, which would count as alive otherwise
        return any(_in_group(process, self.group) for process in psutil.process_iter())


def _in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        return False


class Children:
    """All programs of one run; a context manager that leaves none behind."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[Child] = []
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("watcher.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.close)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, *, listens: bool = False
    ) -> Child:
        """Start a program; its output goes to NAME.log in the logs' folder. `listens`: it is told what to do."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        return self.adopt(name, process, log)

    def adopt(self, name: str, process: Process, log: Path) -> Child:
        """Look after a program that was started by other means, as the leader of a group of its own."""
        child = Child(name, process, log)
        self._running.append(child)
        self._tell(f"+{child.group}")
        return child

    def stop(self, child: Child, timeout_s: float = _STOP_S) -> None:
        """End a program and whatever it started: asked first, killed after `timeout_s`."""
        self._stop([child], timeout_s)

    def close(self) -> None:
        """End everything, newest first; idempotent."""
        atexit.unregister(self.close)
        self._stop(list(reversed(self._running)), _STOP_S)
        if self._watcher.stdin is not None and not self._watcher.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._watcher.stdin.close()
        self._watcher.wait()

    def _stop(self, children: list[Child], timeout_s: float) -> None:
        children = [child for child in children if child in self._running]
        for number, patience_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _STOP_S)):
            for child in children:
                child.send(number)
            deadline = time.monotonic() + patience_s
            while any(child.alive() for child in children) and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S)
        for child in children:
            self._tell(f"-{child.group}")
            self._running.remove(child)

    def _tell(self, line: str) -> None:
        if self._watcher.stdin is not None and not self._watcher.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._watcher.stdin.write(f"{line}\n".encode())
                self._watcher.stdin.flush()


def wait_until(what: str, ready: Callable[[], bool], watched: Sequence[Child], timeout_s: float) -> None:
    """Look again and again until `ready`; raises DemoError at the deadline or as soon as a watched program ends."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        for child in watched:
            child.check()
        if time.monotonic() > deadline:
            tails = "\n".join(f"  {child.name} ({child.log}):\n{child.tail()}" for child in watched)
            raise DemoError(f"{what}: not after {timeout_s:.0f} s\n{tails}")
        time.sleep(_LOOK_EVERY_S)


def descendants() -> list[str]:
    """Return the process ids and command lines of descendants of this process that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
    return found


def kill_descendants() -> None:
    """Kill every descendant of this process."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
