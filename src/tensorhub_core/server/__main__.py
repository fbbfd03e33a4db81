"""Run the embedded hub of this user: `python -m tensorhub_core.server [--detach]`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

from tensorhub_core.clock import SystemClock
from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import TensorHubError
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.collecting import collect_seldom
from tensorhub_core.server.embedded import runtime_folder
from tensorhub_core.server.hub import Hub, run_hub
from tensorhub_core.settings import load_settings

LOG_BYTES = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hub; return 0 when it ended cleanly or another one already runs, 1 on an error (said on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m tensorhub_core.server", description="TensorHub's embedded hub.")
    parser.add_argument("--detach", action="store_true", help="go on as a process of its own once the hub listens")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for a hub that starts or ends")
    options = parser.parse_args(arguments)
    try:
        server = load_settings().server
        folder = runtime_folder(server.runtime_dir)
        if options.detach:
            return _detached(folder, server, options.timeout)
        handler = logging.StreamHandler()
        _serve(folder, server, options.timeout, handler, lambda address: print(f"listening on {address}", flush=True))
    except TensorHubError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(
    folder: Path, server: ServerConfig, timeout_s: float, handler: logging.Handler, listening: Callable[[str], None]
) -> None:
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    get_logger().addHandler(handler)
    get_logger().setLevel(server.log_level.upper())

    def ready(address: str, hub: Hub | None) -> None:
        if hub is not None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: hub.loop.stop())
        listening(address)

    collect_seldom()
    run_hub(folder, server, clock=SystemClock(), timeout_s=timeout_s, ready=ready)


def _detached(folder: Path, server: ServerConfig, timeout_s: float) -> int:
    """Fork before any thread or socket exists; the parent waits until the child listens, and reports its error."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        return _await_child(read_end, timeout_s)
    os.close(read_end)
    log = folder / "hub.log"
    code = 1
    try:
        os.setsid()
        os.chdir("/")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        _redirect_output(log)
        handler = RotatingFileHandler(log, maxBytes=LOG_BYTES, backupCount=1)

        def listening(address: str) -> None:
            os.write(write_end, b"+" + address.encode())
            os.close(write_end)

        _serve(folder, server, timeout_s, handler, listening)
        code = 0
    except Exception as error:
        get_logger("server").critical("the embedded hub died", exc_info=not isinstance(error, TensorHubError))
        told = str(error) if isinstance(error, TensorHubError) else f"{type(error).__name__}: {error}; see {log}"
        with contextlib.suppress(OSError):  # nobody listens any more once it was up
            os.write(write_end, f"-{told}".encode())
    finally:
        logging.shutdown()
        os._exit(code)


def _await_child(read_end: int, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    said = b""
    while True:
        readable, _, _ = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            said = said or b"-it does not listen yet"
            break
        part = os.read(read_end, 4096)
        if not part:
            break
        said += part
    if said.startswith(b"+"):
        return 0
    print(f"Error: {said[1:].decode(errors='replace') or 'the hub died'}", file=sys.stderr)
    return 1


def _redirect_output(log: Path) -> None:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
