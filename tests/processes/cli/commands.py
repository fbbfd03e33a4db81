"""Run the `tensorhub` command as users do: as processes, with a deadline on everything."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMAND = (sys.executable, "-m", "tensorhub_core.cli.main")
TIMEOUT_S = 60.0
HUB_OPTIONS = ("--lease-s", "1", "--heartbeat-s", "0.2", "--grace-s", "1")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Return the one line of a failed command."""
        assert self.code == 1, f"exit code {self.code}: {self.out}{self.err}"
        lines = [line for line in self.err.splitlines() if line.startswith("Error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err, self.err
        return lines[0]


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a command: one thread for numerics, and `extra`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


def tensorhub(*arguments: object, timeout_s: float = TIMEOUT_S, **extra: str) -> Ended:
    """Run a command to its end."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(**extra),
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


class Running:
    """A command that serves until it is told to end; `first_line` is its first line on stdout."""

    def __init__(self, *arguments: object, log: Path, **extra: str) -> None:
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(**extra),
            )
        try:
            self.first_line = self._read_line()
        except BaseException:
            self.kill()
            raise

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        deadline, data = time.monotonic() + TIMEOUT_S, b""
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 4096) if ready else b""
            assert chunk, f"no first line: {self._log.read_text()}"
            data += chunk
        return data.decode().splitlines()[0]

    def end(self, number: int = signal.SIGTERM) -> Ended:
        """Send a signal and return how the command ended."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=TIMEOUT_S)
        return Ended(self.process.returncode, out.decode(), self._log.read_text())

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def running(*arguments: object, log: Path, **extra: str) -> Iterator[Running]:
    """Run a serving command for the length of a block."""
    command = Running(*arguments, log=log, **extra)
    try:
        yield command
    finally:
        command.kill()
