"""Real SGLang servers, forked from the zygote, and requests that are watched while they run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from . import window
from .zygote import START_S, Forked, Job, Zygote

LAUNCH = "sglang.launch_server"
OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--mem-fraction-static", "0.05", "--max-total-tokens", "4096"),
    *("--max-running-requests", "8", "--random-seed", "0", "--skip-server-warmup", "--log-level", "info"),
    *("--host", "127.0.0.1"),
)
FLOAT32 = ("--dtype", "float32")
"""So that answers do not depend on the number of ranks; for checkpoints of this type."""

CORES = {1: "0", 2: "0|1"}
LONG = [(i * 7) % 300 + 3 for i in range(150)]
"""Long enough to be answered from the prefix cache when it is asked twice."""
PROMPTS = ([5, 6, 7, 8, 9], [100, 200, 300], LONG)
Answers = list[list[int]]
HTTP = httpx.Client(verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
"""One for all: making one reads certificates, which takes longer than any of these requests."""


@dataclass
class Served:
    """A server that was started."""

    url: str
    process: Forked
    folder: Path

    def version(self) -> dict[str, Any]:
        """Return the body of `GET /tensorhub/version`."""
        return dict(HTTP.get(f"{self.url}/tensorhub/version", timeout=20).raise_for_status().json())

    def update(self, **body: Any) -> httpx.Response:
        """Send `POST /tensorhub/update`."""
        return self.post("/tensorhub/update", **body)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send any request with a JSON body."""
        return HTTP.post(f"{self.url}{path}", json=body, timeout=120)

    def generate(self, prompt: Sequence[int], tokens: int = 12, **options: Any) -> dict[str, Any]:
        """Return one completion at temperature 0: output_ids, meta_info."""
        body = {"input_ids": list(prompt), "sampling_params": sampling(tokens), **options}
        return dict(self.post("/generate", **body).raise_for_status().json())

    def answers(self) -> Answers:
        """Return the tokens that answer PROMPTS, one request at a time: in one batch, roundings may differ."""
        return [list(self.generate(prompt)["output_ids"]) for prompt in PROMPTS]

    def memory(self, rank: int = 0) -> dict[str, str]:
        """Return what is in the memory of a rank's model, by tensor."""
        return window.look(self.folder, rank)

    def text(self) -> str:
        """Return what the server has written."""
        return self.process.text()

    def wait(self, version: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the server serves a version; returns the body of `GET /tensorhub/version`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            body = self.version()
            if (body["state"], body["version"]) == ("serving", version):
                return body
            time.sleep(0.05)
        raise AssertionError(f"not at version {version} after {timeout_s} s: {self.version()}\n{self.text()[-4000:]}")

    def ready(self) -> Served:
        """Wait until the server answers; fails with what it has written if it ends."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            code = self.process.poll()
            assert code is None, f"the server ended with {code}:\n{self.text()[-8000:]}"
            with contextlib.suppress(httpx.HTTPError):
                if HTTP.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"not ready after {START_S} s:\n{self.text()[-8000:]}")

    def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the server's process and return its exit code."""
        until = time.monotonic() + timeout_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < until, f"still running after {timeout_s} s:\n{self.text()[-8000:]}"
            time.sleep(0.05)
        return code

    def terminate(self) -> int:
        """Ask it to end, as an operator does, and return its exit code."""
        os.kill(self.process.pid, signal.SIGTERM)
        return self.ended()


def sampling(tokens: int) -> dict[str, Any]:
    """Return the parameters for so many tokens at temperature 0."""
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


class Servers:
    """Starts servers; their output and sockets go to folders of their own."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote, self._folder = zygote, folder
        self._count = 0
        self._fresh: dict[tuple[Any, ...], Fresh] = {}

    def start(
        self,
        model: Path,
        *options: str,
        ranks: int = 1,
        config: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        forked: bool = True,
    ) -> Served:
        """Start a server and return at once; with `config`, one that takes its weights from TensorHub.

        Not `forked` = an interpreter of its own that spawns its ranks, as users start it: that takes far longer.
        """
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        command = ["--model-path", str(model), *OPTIONS, "--tp-size", str(ranks)]
        if config is not None:
            command += ["--weight-source", "tensorhub", "--weight-source-config", json.dumps(config)]
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            command += ["--port", str(port), *options]
            bound = {"SGLANG_CPU_OMP_THREADS_BIND": CORES[ranks], **(environment or {})}
            job = Job(LAUNCH, "", command, bound, str(folder / "log"), str(folder))
            if not forked:
                program = [sys.executable, "-m", LAUNCH, *command]
                job = Job("os", "execv", [sys.executable, program], bound, str(folder / "log"))
            process = self._zygote.fork(job, listener if forked else None)
        return Served(f"http://127.0.0.1:{port}", process, folder)

    @contextlib.contextmanager
    def running(self, model: Path, *options: str, **how: Any) -> Iterator[Served]:
        """Start a server, wait until it answers, end it."""
        server = self.start(model, *options, **how)
        with ending(server):
            yield server.ready()

    def fresh(self, checkpoint: Path, *options: str, ranks: int = 1, ask: bool = True) -> Fresh:
        """Return what a stock engine is that has loaded the checkpoint from disk; started once for each.

        Not `ask` = for a model that SGLang loads on a CPU, and cannot compute there.
        """
        key = (checkpoint, options, ranks)
        if key not in self._fresh:
            with self.running(checkpoint, *options, ranks=ranks) as server:
                self._fresh[key] = Fresh(
                    server.answers() if ask else [], [server.memory(rank) for rank in range(ranks)]
                )
        return self._fresh[key]

    def call(self, module: str, function: str, *arguments: Any, environment: dict[str, str] | None = None) -> Forked:
        """Run a function with JSON arguments in a forked process, where `sglang.Engine` can be used."""
        self._count += 1
        log = self._folder / f"{self._count}.log"
        bound = {"SGLANG_CPU_OMP_THREADS_BIND": CORES[1], **(environment or {})}
        return self._zygote.fork(Job(module, function, list(arguments), bound, str(log)))


@dataclass(frozen=True)
class Fresh:
    """A fresh engine's answers to PROMPTS, and what its ranks hold."""

    answers: Answers
    memory: list[dict[str, str]]


@contextlib.contextmanager
def ending(*servers: Served) -> Iterator[None]:
    """End servers for good."""
    try:
        yield
    finally:
        for server in servers:
            server.process.end()
        for server in servers:
            server.ended()


@dataclass
class Stream:
    """One streamed request in a thread of its own."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    versions: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    thread: threading.Thread = field(default_factory=threading.Thread)

    def started(self, least: int, timeout_s: float = 60.0) -> None:
        """Wait until the first tokens have come."""
        until_s = time.monotonic() + timeout_s
        while len(self.tokens) < least:
            assert time.monotonic() < until_s, "the request did not start"
            assert self.thread.is_alive() or len(self.tokens) >= least, self.error
            time.sleep(0.005)

    def join(self, timeout_s: float = 60.0) -> None:
        """Wait for the end."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the request is still running"
        assert not self.error, self.error


def stream(server: Served, prompt: Sequence[int], tokens: int) -> Stream:
    """Start a request at temperature 0."""
    found = Stream()
    found.thread = threading.Thread(target=_read, args=(server, list(prompt), tokens, found), daemon=True)
    found.thread.start()
    return found


def _read(server: Served, prompt: list[int], tokens: int, found: Stream) -> None:
    body = {"input_ids": prompt, "sampling_params": sampling(tokens), "stream": True}
    try:
        with HTTP.stream("POST", f"{server.url}/generate", json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                meta = event["meta_info"]
                found.tokens = event["output_ids"]
                found.finish = (meta.get("finish_reason") or {}).get("type")
                found.versions = meta.get("weight_versions") or found.versions
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
