"""A process that has imported SGLang once and forks servers: they start in seconds, and each is what its command makes.

    python -m tests.engines.sglang.zygote FD True

Tests hold the other end of the socket FD. A request is one message: what to run, arguments, environment, where the
output goes, and for a server the bound socket that it shall listen on, so that no other process can take its port. The
process ends, with all that it forked, when the tests' end of the socket closes, however that comes about.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SHIM = Path(__file__).parent / "shim"
ENVIRONMENT = {
    "PYTHONPATH": str(SHIM),
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # asking for health must not fill the prefix cache
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}
"""What SGLang needs on a machine without a GPU, and what keeps it quick there."""

START_S = 300.0
_MESSAGE_BYTES = 1 << 17


@dataclass(frozen=True)
class Job:
    """What a forked process does: the main program of `module` if `function` is empty, else that function."""

    module: str
    function: str
    arguments: list[Any]
    environment: dict[str, str]
    log: str
    windows: str = ""
    """The folder where the ranks of an engine show their tensors."""


# --- the tests' side ------------------------------------------------------------------------------------------------


@dataclass
class Forked:
    """A process that the zygote forked."""

    zygote: Zygote
    pid: int
    log: Path
    _code: int | None = field(default=None)

    def poll(self) -> int | None:
        """Return its exit code (-N after signal N), or None as long as it runs."""
        if self._code is None:
            self._code = self.zygote.ask({"poll": self.pid})["code"]
        return self._code

    def end(self) -> None:
        """End it and all of its group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def text(self) -> str:
        """Return what it has written."""
        return self.log.read_text(errors="replace")


class Zygote:
    """Starts the process when it is first needed, and asks it to fork."""

    def __init__(self, folder: Path, *, warm: bool = True, python: str = sys.executable) -> None:
        """Start nothing yet; `warm` = import SGLang, without which forks serve to test this very class."""
        self.folder, self._warm, self._python = folder, warm, python
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def fork(self, job: Job, listener: socket.socket | None = None) -> Forked:
        """Fork a process that does `job`; `listener` is the socket that a server listens on."""
        reply = self.ask({"fork": asdict(job)}, listener)
        return Forked(self, reply["pid"], Path(job.log))

    def ask(self, request: Mapping[str, Any], listener: socket.socket | None = None) -> dict[str, Any]:
        """Send one request and return the reply; fails with the zygote's output if it has none."""
        with self._lock:
            channel = self._begin()
            fds = [listener.fileno()] if listener is not None else []
            try:
                socket.send_fds(channel, [json.dumps(request).encode()], fds)
                answer = channel.recv(_MESSAGE_BYTES)
            except OSError as error:
                raise AssertionError(f"the zygote does not answer: {error}\n{self.text()}") from None
            assert answer, f"the zygote has ended:\n{self.text()}"
            return dict(json.loads(answer))

    def text(self) -> str:
        """Return what the zygote itself has written."""
        return (self.folder / "zygote.log").read_text(errors="replace")

    def begin(self) -> None:
        """Start the process, which imports SGLang, and do not wait for it."""
        with self._lock:
            self._begin()

    def _begin(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [self._python, "-m", "tests.engines.sglang.zygote", str(theirs.fileno()), str(self._warm)]
        with (self.folder / "zygote.log").open("wb") as log, theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        ours.settimeout(START_S)  # its first answer comes when it has imported SGLang
        self._channel = ours
        return ours

    def close(self) -> None:
        """End the zygote, and with it all that it forked."""
        if self._process is not None and self._channel is not None:
            self._channel.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may still import
                self._process.wait(20)
            self._process.kill()  # what it forked dies with it
            self._process.wait()


# --- the process ----------------------------------------------------------------------------------------------------


class Loop:
    """Answers requests until the other end closes; returns in the child what it is to do."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}

    def run(self) -> tuple[Job, int | None] | None:
        """Return the job in a forked child, with the descriptor that came along; None when the tests have ended."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 1)
            if not data:
                self._end_all()
                return None
            request = json.loads(data)
            if "fork" in request:
                pid = os.fork()
                if pid == 0:
                    self._channel.close()
                    return Job(**request["fork"]), fds[0] if fds else None
                for fd in fds:
                    os.close(fd)
                self._running.add(pid)
                reply: dict[str, int | None] = {"pid": pid}
            else:
                reply = {"code": self._code(request["poll"])}
            self._channel.send(json.dumps(reply).encode())

    def _code(self, pid: int) -> int | None:
        if pid in self._running:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._running.remove(pid)
                self._ended[pid] = os.waitstatus_to_exitcode(status)
        return self._ended.get(pid)

    def _end_all(self) -> None:
        """End every group, also of those whose first process has ended: its ranks may be left."""
        for pid in (*self._running, *self._ended):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _import() -> None:
    """Import what a server imports, so that a forked one need not."""
    for name in (
        "sglang.launch_server",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.models.registry",
        "transformers.models.auto.tokenization_auto",
    ):
        importlib.import_module(name)
    # Not the plug-ins: each process loads them as any SGLang process does, under its own arguments and environment.


def _become(job: Job, parent: int) -> None:
    """Be a process of its own: session, output, environment; die with the zygote."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    output = os.open(job.log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(job.environment)


def _adapt(job: Job, listener: int | None) -> None:
    """Make this process's engine fork its ranks, listen on the given socket, and show its tensors."""
    import multiprocessing
    import random

    import uvicorn

    random.seed()  # or every forked server would draw the same port for its ranks
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: set_start_method("fork", force=True)
    if listener is not None:
        run = uvicorn.Server.run
        bound = socket.socket(fileno=listener)
        uvicorn.Server.run = lambda self, sockets=None: run(self, [bound])
    if job.windows:
        from tests.engines.sglang import window

        window.open_in_every_rank(Path(job.windows))


def _do(job: Job) -> None:
    if job.function:
        getattr(importlib.import_module(job.module), job.function)(*job.arguments)
        return
    sys.argv = [job.module, *job.arguments]
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def main(arguments: Sequence[str]) -> None:
    """Import, then fork until the tests have ended; a forked process leaves through here like any main program."""
    with socket.socket(fileno=int(arguments[0])) as channel:
        if arguments[1] == "True":
            _import()
        parent = os.getpid()
        found = Loop(channel).run()
    if found is None:
        os._exit(0)  # taking down all that was imported takes seconds
    job, listener = found
    _become(job, parent)
    _adapt(job, listener)
    _do(job)


if __name__ == "__main__":
    main(sys.argv[1:])
