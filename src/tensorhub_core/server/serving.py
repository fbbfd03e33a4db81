"""Run the reference server in a thread of this process: `with serve() as server: server.address`."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorhub_core.clock import SystemClock
from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import ConfigError, TensorHubError
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.counters import Counters
from tensorhub_core.server.journal import Journal
from tensorhub_core.server.loop import ServerLoop
from tensorhub_core.server.options import machine_config
from tensorhub_core.settings import Settings, load_settings
from tensorhub_core.wire.curve import ServerKeys, server_keys

JOIN_TIMEOUT_S = 10.0


def epoch_now() -> int:
    """Return a server epoch from the wall clock in milliseconds: higher than that of any earlier life."""
    return time.time_ns() // 1_000_000


class Server:
    """A running reference server; ends with its `with` block or `close()`."""

    def __init__(self, loop: ServerLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tensorhub-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Return the address that clients connect to, with the real port."""
        return self._loop.address

    @property
    def counters(self) -> Counters:
        """Return the running totals of the server's messages."""
        return self._loop.counters

    def close(self) -> None:
        """Stop serving and free the address; idempotent. Raises TensorHubError if the server had died before."""
        if os.getpid() != self._pid:  # a forked child has the object, but neither the thread nor the sockets
            return
        self._loop.stop()
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise TensorHubError(f"the server at {self.address} did not stop within {JOIN_TIMEOUT_S:g} s")
        self._loop.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TensorHubError(f"the server at {self.address} had died: {failure}") from failure

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:  # reported by close(); the log has it at once
            get_logger("server").critical("the server at %s died", self.address, exc_info=True)
            self._failure = error


def serve(
    bind: str = "tcp://127.0.0.1:0",
    *,
    retain: int | None = None,
    retain_models: Mapping[str, int] | None = None,
    lease_s: float | None = None,
    heartbeat_s: float | None = None,
    grace_s: float | None = None,
    settings: Mapping[str, object] | Settings | None = None,
) -> Server:
    """Start a reference server in a thread of this process and return it listening; None = the setting's value.

    The newest `retain` versions of a model stay reachable, or another number of those that `retain_models` names.

    Raises AddressInUse if another process listens on `bind`, ConfigError for impossible addresses and values. Any
    thread may call it.
    """
    values = {"retain": retain, "lease_s": lease_s, "heartbeat_s": heartbeat_s, "grace_s": grace_s}
    given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    if retain_models is not None:
        given["retain_models"] = ",".join(f"{name}={number}" for name, number in retain_models.items())
    if isinstance(settings, Settings):
        server = dataclasses.replace(settings.server, **given)
    else:
        server = load_settings({**(settings or {}), **given}).server
    return Server(make_loop(server, bind, epoch_now(), server_keys(server)))


def make_loop(server: ServerConfig, bind: str, epoch: int, keys: ServerKeys | None) -> ServerLoop:
    """Listen on `bind` as life `epoch` of a server with these settings; raises AddressInUse or ConfigError."""
    config = machine_config(server, epoch)
    journal = None
    if server.journal is not None:
        try:
            journal = Journal(Path(server.journal), server.journal_limit_bytes, get_logger("server"))
        except OSError as error:
            raise ConfigError(f"the journal {server.journal} cannot be written: {error.strerror or error}") from None
    try:
        return ServerLoop(config, bind, clock=SystemClock(), keys=keys, journal=journal)
    except BaseException:
        if journal is not None:
            journal.close()
        raise
