"""A process that does what a test tells it: workers by handle, one JSON command a message, each on a thread of its own.

`Actor` is the test's side. All are forked from a process that has imported what takes long, before it had any thread;
an actor ends when the test's end of its connection is closed.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

IMPORTED_ONCE = ["torch", "pytest", "tensorhub_core.client.connect", "tests.processes.client.samples", __name__]
"""Nothing that reads the environment when it is imported, as NIXL does: a test may have changed it."""


class RemoteError(Exception):
    """The command raised this in the actor: `kind` is the type's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Actor:
    """A started actor; use as a context manager."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=act, args=(theirs, {**os.environ, "OMP_NUM_THREADS": "1"}))
        self._process.start()
        theirs.close()
        self._next = 0
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.events: queue.Queue[Any] = queue.Queue()
        """What progress callbacks of the actor report: [handle, done_bytes, total_bytes, source]."""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._take(json.loads(self._connection.recv_bytes()))
        with self._lock:
            for future in self._open.values():
                future.set_exception(RemoteError("EOFError", "the actor is gone"))
            self._open.clear()

    def _take(self, answer: dict[str, Any]) -> None:
        if "event" in answer:
            self.events.put(answer["event"])
            return
        with self._lock:
            future = self._open.pop(answer["id"])
        if "error" in answer:
            future.set_exception(RemoteError(*answer["error"]))
        else:
            future.set_result(answer["value"])

    def begin(self, command: str, handle: str = "", **arguments: Any) -> Future[Any]:
        """Send a command; its result comes into the future."""
        future: Future[Any] = Future()
        with self._lock:
            self._next += 1
            self._open[self._next] = future
            line = json.dumps({"id": self._next, "command": command, "handle": handle, "arguments": arguments})
            self._connection.send_bytes(line.encode())
        return future

    def do(self, command: str, handle: str = "", timeout_s: float = 60.0, **arguments: Any) -> Any:
        """Send a command and wait for its result."""
        return self.begin(command, handle, **arguments).result(timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.signal(signal.SIGCONT)
        with suppress(OSError):
            self._half_close()
        self._process.join(20)
        if self.alive:
            self.kill()
        self._reader.join(10)
        self._connection.close()

    def _half_close(self) -> None:
        """Tell the actor that no command will come any more; what it still says is read."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_WR)


class _Stage:
    """The actor's side: workers and their tensors by handle."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._out = connection, threading.Lock()
        self._workers: dict[str, Any] = {}
        self._tensors: dict[str, Any] = {}
        self._staged: dict[str, Any] = {}
        self._go = threading.Event()

    def say(self, message: dict[str, Any]) -> None:
        with self._out:
            self._connection.send_bytes(json.dumps(message).encode())

    def run(self, line: bytes) -> None:
        order = json.loads(line)
        try:
            value = getattr(self, f"do_{order['command']}")(order["handle"], **order["arguments"])
        except Exception as error:
            self.say({"id": order["id"], "error": [type(error).__name__, str(error)]})
        else:
            self.say({"id": order["id"], "value": value})

    def do_connect(self, handle: str, **arguments: Any) -> str:
        from tensorhub_core import connect

        self._workers[handle] = connect(**arguments)
        return str(self._workers[handle].replica)

    def do_register(self, handle: str, sample: str, seed: int = 0, blank: bool = False, **more: Any) -> None:
        from tests.processes.client import samples

        tensors = samples.make(sample, seed, **more)
        self._tensors[handle] = samples.blank(tensors) if blank else tensors
        self._workers[handle].register(self._tensors[handle])

    def progress(self, handle: str, hold: bool) -> Callable[[int, int, str], None]:
        """Return a callback that reports every step; with `hold` also slows a read down and holds it at half."""

        def report(done: int, total: int, source: str) -> None:
            self.say({"event": [handle, done, total, source]})
            if hold and done < total // 2:
                time.sleep(0.03)
            elif hold:
                self._go.wait(60)

        return report

    def do_go(self, handle: str) -> None:
        """Let go of everything that is held at half."""
        self._go.set()

    def do_call(self, handle: str, method: str, report: bool = False, hold: bool = False, **arguments: Any) -> Any:
        if report or hold:
            arguments["progress"] = self.progress(handle, hold)
        value = getattr(self._workers[handle], method)(**arguments)
        if isinstance(value, list):
            return [dataclasses.asdict(entry) for entry in value]
        return value if value is None else int(value)

    def do_stage(self, handle: str, report: bool = False, hold: bool = False, **arguments: Any) -> int:
        """Stage a version; `staged` calls a method of what came of it."""
        if report or hold:
            arguments["progress"] = self.progress(handle, hold)
        self._staged[handle] = self._workers[handle].stage(**arguments)
        return int(self._staged[handle].version)

    def do_staged(self, handle: str, method: str, **arguments: Any) -> Any:
        value = getattr(self._staged[handle], method)(**arguments)
        return None if value is None else int(value)

    def do_hang_installs(self, handle: str) -> None:
        """Let the next installs write some bytes, say so and hang."""
        from tensorhub_core.client.installing import LocalCopy

        def hang(copy: LocalCopy) -> None:
            buffer = copy._copies.memory.buffers[0]
            assert buffer is not None
            buffer[:4096] = 0
            self.say({"event": [handle, "installing"]})
            threading.Event().wait()

        LocalCopy._fill_devices = hang  # type: ignore[method-assign]

    def do_resident_bytes(self, handle: str) -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def do_version(self, handle: str) -> int | None:
        version = self._workers[handle].version
        return None if version is None else int(version)

    def do_counters(self, handle: str) -> dict[str, int]:
        return dataclasses.asdict(self._workers[handle].counters)

    def do_digest(self, handle: str) -> str:
        from tests.processes.client import samples

        return samples.digest(self._tensors[handle])

    def do_flip(self, handle: str, name: str) -> None:
        """Change one bit in the middle of a tensor."""
        import torch

        flat = self._tensors[handle][name].reshape(-1).view(torch.uint8)
        flat[len(flat) // 2] ^= 1

    def do_fill(self, handle: str, value: int) -> None:
        """Overwrite every byte."""
        import torch

        for tensor in self._tensors[handle].values():
            tensor.reshape(-1).view(torch.uint8).fill_(value)

    def do_close(self, handle: str) -> None:
        self._workers.pop(handle).close()

    def do_threads(self, handle: str) -> int:
        return threading.active_count()


def act(connection: Connection, environment: dict[str, str]) -> None:
    """Carry commands out until no more come; in the actor's process."""
    import torch

    from tests.processes.client.steps import read_in_small_steps

    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    read_in_small_steps()
    stage = _Stage(connection)
    with suppress(EOFError):
        while True:
            line = connection.recv_bytes()
            threading.Thread(target=stage.run, args=(line,), daemon=True).start()
    for worker in list(stage._workers.values()):
        worker.close()
