"""A real `vllm serve` process, and requests that are watched while they run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 280.0


def free_port() -> int:
    """Return a port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def version(self) -> dict[str, Any]:
        """Return the body of `GET /tensorhub/version`."""
        return dict(httpx.get(f"{self.url}/tensorhub/version", timeout=20).raise_for_status().json())

    def update(self, **body: Any) -> httpx.Response:
        """Send `POST /tensorhub/update`."""
        return httpx.post(f"{self.url}/tensorhub/update", json=body, timeout=120)

    def generate(self, prompt: list[int], tokens: int, logprobs: bool = False) -> dict[str, Any]:
        """Return one completion at temperature 0: token_ids, finish_reason, weight_versions."""
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, **({"logprobs": 1} if logprobs else {})}
        body = {"token_ids": prompt, "sampling_params": sampling}
        reply = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=120).raise_for_status()
        return dict(reply.json()["choices"][0])

    def text(self) -> str:
        """Return what the server has logged."""
        return self.log.read_text(errors="replace")

    def wait(self, version: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait until the server serves a version."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            body = self.version()
            if (body["state"], body["version"]) == ("serving", version):
                return body
            time.sleep(0.05)
        raise AssertionError(f"not at version {version} after {timeout_s} s: {self.version()}\n{self.text()[-4000:]}")


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


def stream(server: Served, prompt: list[int], tokens: int) -> Stream:
    """Start a request."""
    found = Stream()
    found.thread = threading.Thread(target=_read, args=(server, prompt, tokens, found), daemon=True)
    found.thread.start()
    return found


def _read(server: Served, prompt: list[int], tokens: int, found: Stream) -> None:
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
    try:
        with httpx.stream("POST", f"{server.url}/inference/v1/generate", json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                choice = json.loads(line[6:])["choices"][0]
                found.tokens += choice.get("token_ids") or []
                found.finish = choice.get("finish_reason") or found.finish
                found.versions = choice.get("weight_versions") or found.versions
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"


def launch(model: Path, config: dict[str, Any], log: Path, *, ranks: int, cores: str) -> Served:
    """Start a server and return at once."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--enforce-eager"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M"]
    command += ["--tensor-parallel-size", str(ranks), "--enable-scale-out", "--weight-source", "tensorhub"]
    command += ["--weight-source-config", json.dumps(config)]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    environment.update(
        VLLM_CPU_OMP_THREADS_BIND=cores,
        VLLM_LOGGING_LEVEL="INFO",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        PYTHONUNBUFFERED="1",
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    return Served(f"http://127.0.0.1:{port}", process, log)


def wait_ready(server: Served) -> None:
    """Wait until the server answers; fails with its log if it ends."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert server.process.poll() is None, f"the server ended:\n{server.text()[-6000:]}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.25)
    raise AssertionError(f"not ready after {START_S} s:\n{server.text()[-6000:]}")


def leave_room(server: Served, core: int) -> None:
    """Keep a running engine's processes on one core: they spin, and with one on each the API server answers to nobody.

    On two cores a stream then comes only when its request has ended, and a swap asked for meanwhile is too late.
    """
    for process in psutil.Process(server.process.pid).children(recursive=True):
        for task in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(task.id, {core})


@contextlib.contextmanager
def ending(*servers: Served) -> Iterator[None]:
    """End servers for good, politely first."""
    try:
        yield
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
