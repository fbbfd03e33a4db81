"""Servers that settle by a lock file which of them serves, as processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.processes.server.raw import eventually, free_port

FAST = ("--lease-s", "1", "--heartbeat-s", "0.1")
TAKEOVER_S = 20.0


class Candidate:
    """One `tensorhub serve --lock`; it may wait, serve, be stopped, or be over."""

    def __init__(self, folder: Path, lock: Path, name: str, *arguments: str) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self._output, self._errors = folder / f"{name}.out", folder / f"{name}.err"
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tensorhub_core.cli.main", "serve", "--bind", self.address),
                    *("--lock", str(lock), *FAST, *arguments),
                ],
                stdout=output,
                stderr=errors,
            )

    @property
    def log(self) -> str:
        """Return what it wrote to stderr so far."""
        return self._errors.read_text()

    @property
    def serves(self) -> bool:
        """Tell whether it said that it listens."""
        return f"listening on {self.address}" in self._output.read_text()

    def wait_until_it_serves(self) -> None:
        """Wait until it has taken over."""
        eventually(lambda: self.serves, f"it serves; {self.log}", TAKEOVER_S)

    def wait_until_it_waits(self) -> None:
        """Wait until it says that it is a standby."""
        eventually(lambda: "standby: waiting for" in self.log, f"it waits; {self.log}", TAKEOVER_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def code(self, timeout_s: float = 20.0) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """Leave nothing behind, whatever its state."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()


class Candidates:
    """Makes candidates for one lock file; all are ended with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, folder / "hub.lock"
        self._made: list[Candidate] = []

    def start(self, *arguments: str) -> Candidate:
        """Start one more."""
        made = Candidate(self.folder, self.lock, f"hub{len(self._made)}", *arguments)
        self._made.append(made)
        return made

    def pair(self) -> tuple[Candidate, Candidate]:
        """Start one that serves and one that waits."""
        active = self.start()
        active.wait_until_it_serves()
        waiting = self.start()
        waiting.wait_until_it_waits()
        return active, waiting

    def counter(self) -> int:
        """Return the counter in the lock file."""
        return int(self.lock.read_text())


@contextlib.contextmanager
def candidates(folder: Path) -> Iterator[Candidates]:
    """Make candidates for the block."""
    made = Candidates(folder)
    try:
        yield made
    finally:
        for candidate in made._made:
            candidate.end()
