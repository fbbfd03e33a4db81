"""Start SGLang's programs: servers that follow the hub, and fresh stock engines for the proof.

They are forked from one process that has imported SGLang: a server is up in seconds. Without CUDA a shim of the tests
stands in for the packages of SGLang's kernels; with a GPU each would be `python -m sglang.launch_server`, and no shim.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from demo.processes import Child, Children, DemoError
from demo.rhymes import DTYPE
from demo.serving import source_config
from tests.engines.sglang.zygote import Forked, Job, Zygote

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".envs" / "sglang" / "bin" / "python"
LIMITS: dict[str, Any] = {
    "device": "cpu",
    "dtype": DTYPE,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.05,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "random_seed": 0,
    "skip_server_warmup": True,
}
"""Alike for the followers and the fresh engines of the proof."""

_POLL_S = 0.1


class SGLang:
    """Starts SGLang's programs; to be closed when the last of them is not needed any more."""

    def __init__(self, children: Children, folder: Path) -> None:
        if not PYTHON.exists():
            raise DemoError(f"{PYTHON} does not exist: run `make env-sglang`")
        folder.mkdir()
        self._children, self._folder = children, folder
        self._zygote = Zygote(folder, python=str(PYTHON))

    def begin(self) -> None:
        """Begin to import SGLang, and return."""
        self._zygote.begin()

    def serve(self, replica: str, model: Path, hub: str, core: int, *, mode: str) -> tuple[Child, int]:
        """Start `sglang.launch_server --weight-source tensorhub` on a core; returns it and the port it listens on."""
        command = ["--model-path", str(model), "--host", "127.0.0.1", "--sleep-on-idle", "--log-level", "info"]
        for name, value in LIMITS.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
        config = json.dumps(source_config(hub, replica, mode=mode))
        command += ["--weight-source", "tensorhub", "--weight-source-config", config]
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            child = self._fork(replica, "sglang.launch_server", "", [*command, "--port", str(port)], core, listener)
        return child, port

    def fresh(self, name: str, checkpoint: Path, ask: Path, out: Path, core: int) -> Child:
        """Start a stock engine that answers what `ask` holds (fresh.py)."""
        arguments = [str(checkpoint), str(ask), str(out), LIMITS]
        return self._fork(name, "demo.sglang.fresh", "answer", arguments, core)

    def close(self) -> None:
        """End what still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is killed then
            self._zygote.close()

    def _fork(
        self, name: str, module: str, function: str, arguments: Sequence[Any], core: int, *given: socket.socket
    ) -> Child:
        environment = {"SGLANG_CPU_OMP_THREADS_BIND": str(core)}
        log = self._folder / f"{name}.log"
        job = Job(module, function, list(arguments), environment, str(log))
        try:
            forked = self._zygote.fork(job, *given)
        except AssertionError as error:
            raise DemoError(str(error)) from None
        return self._children.adopt(name, ForkedProcess(forked), log)


class ForkedProcess:
    """A forked program as Children look after it."""

    stdin: IO[bytes] | None = None

    def __init__(self, forked: Forked) -> None:
        self._forked = forked

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._forked.pid

    def poll(self) -> int | None:
        """Return its exit code if it has ended; when the process that forked it is gone, as if it had been killed."""
        try:
            return self._forked.poll()
        except AssertionError:
            return None if psutil.pid_exists(self.pid) else -signal.SIGKILL

    def wait(self, timeout: float) -> int:
        """Return its exit code; raises subprocess.TimeoutExpired."""
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_S)
        return code
