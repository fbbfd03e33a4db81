"""Processes that do what a script tells them: one JSON command a line, each carried out on a thread of its own.

`Remote` is the script's side. The process calls `answer` with its commands, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = (str(ROOT / "src"), str(ROOT / "bench"))
"""Where the processes find their modules."""
_END_TIMEOUT_S = 10.0


class RemoteError(Exception):
    """The command raised this in the process: `kind` is the type's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Remote:
    """A started process; use as a context manager."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the Python file `program` of this folder, behind `prefix` (`Host.command`: in that namespace)."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1", **(environment or {})}
        command = [*prefix, sys.executable, str(ROOT / "bench" / program), *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, pass_fds=tuple(pass_fds))
        self._next = 0
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.events: queue.Queue[Any] = queue.Queue()
        """What the process reports without being asked."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def begin(self, command: str, **arguments: Any) -> Future[Any]:
        """Send a command; its result comes into the future."""
        future: Future[Any] = Future()
        with self._lock:
            self._next += 1
            self._open[self._next] = future
            line = json.dumps({"id": self._next, "command": command, "arguments": arguments})
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            except OSError as error:
                self._open.pop(self._next)
                future.set_exception(RemoteError("EOFError", str(error)))
        return future

    def do(self, command: str, answer_timeout_s: float = 60.0, **arguments: Any) -> Any:
        """Send a command and wait for its result; raises RemoteError."""
        return self.begin(command, **arguments).result(answer_timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process: by the end of its input, else by force."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.send_signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(_END_TIMEOUT_S)
        self.kill()
        self._reader.join(_END_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "event" in message:
                self.events.put(message["event"])
                continue
            with self._lock:
                future = self._open.pop(message["id"])
            if "error" in message:
                future.set_exception(RemoteError(*message["error"]))
            else:
                future.set_result(message["value"])
        with self._lock:
            for future in self._open.values():
                future.set_exception(RemoteError("EOFError", "the process is gone"))
            self._open.clear()


Say = Callable[[Any], None]
"""Report an event to the script."""


def answer(make: Callable[[Say], Mapping[str, Callable[..., Any]]]) -> None:
    """Carry out commands until the input ends: the process's side. `make` gets a function that reports events."""
    lock = threading.Lock()
    # What libraries print goes to stderr: stdout carries answers.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: Mapping[str, Any]) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    commands = make(lambda event: send({"event": event}))

    def carry_out(line: str) -> None:
        order = json.loads(line)
        try:
            value = commands[order["command"]](**order["arguments"])
        except Exception as error:
            send({"id": order["id"], "error": [type(error).__name__, str(error)]})
        else:
            send({"id": order["id"], "value": value})

    for line in sys.stdin:
        threading.Thread(target=carry_out, args=(line,), daemon=True).start()
