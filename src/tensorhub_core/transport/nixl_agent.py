"""Wrap one NIXL agent: the settings that make it fast and fail in bounded time, and a destruction that is proven.

NIXL's own Python class fixes the progress thread's delay at 0, which lets it spin, so this goes to the bindings under
it. Facts about NIXL 1.5.1 that shape this file: a transfer cannot be aborted, only destroying the agent stops its
writes; a failed registration spoils the agent's metadata; without the STRICT mode several threads crash.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import logging.config
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorhub_core.errors import TransportError
from tensorhub_core.transport.base import Batch, Region

UCX_OPTIONS: Mapping[str, str] = {
    # Larger pieces for each send and receive: 2.3 times the rate of the defaults.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "512K",
    # A cut link is noticed in the end. Not sooner: this also cuts off a reader that has no time to take its bytes.
    "TCP_USER_TIMEOUT": "30s",
    "TCP_KEEPIDLE": "1s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    "KEEPALIVE_INTERVAL": "1s",
    # Connecting never blocks the caller, and fails after 3 s instead of 135 s.
    "TCP_CONN_NB": "y",
    "TCP_SYN_CNT": "1",
}
"""Options of UCX, set for our own agents only; an environment variable `UCX_...` of the same name wins."""

QUIET_ENVIRONMENT: Mapping[str, str] = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
"""Set before NIXL is loaded unless the user did: errors reach the caller as exceptions, not as lines on a terminal."""

PROGRESS_DELAY_US = 1000
_INSTALL = (
    "the nixl transport needs NIXL: pip install 'tensorhub-core[nixl]' (Linux x86_64 or aarch64; on a machine without "
    "CUDA install a CPU build of torch first, or pip brings a CUDA one along)"
)


def load_bindings() -> Any:
    """Import NIXL, keeping its logging to ours; raises TransportError that says how to install it."""
    known = "nixl" in sys.modules
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    raise_exceptions, configure = logging.raiseExceptions, logging.config.dictConfig
    # NIXL configures logging when it is imported, which would close every handler that the program has.
    logging.config.dictConfig = lambda config: None
    try:
        importlib.import_module("nixl")
        bindings = importlib.import_module("nixl._bindings")
    except (ImportError, OSError) as error:
        raise TransportError(f"{_INSTALL}; importing it failed: {error}") from None
    finally:
        logging.raiseExceptions, logging.config.dictConfig = raise_exceptions, configure
    if not known:
        _take_logger()
    return bindings


def _take_logger() -> None:
    """Let NIXL's messages go through the root logger: its own set-up prints them to stdout."""
    logger = logging.getLogger("nixl")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.WARNING)


class NixlAgent:
    """One NIXL agent with the UCX backend; calls come from one thread at a time and from the process that made it."""

    def __init__(self, bindings: Any, name: str, *, progress_thread: bool, interface: str | None) -> None:
        """Create the agent; raises TransportError. The first one of a process takes about 0.5 s, later ones 30 ms."""
        self.name = name
        self._nixl = bindings
        self._pid = os.getpid()
        self._leak = ctypes.pythonapi.Py_IncRef
        config = bindings.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_DELAY_US
        config.captureTelemetry = False
        ucx = dict(UCX_OPTIONS)
        if interface is not None:
            ucx["NET_DEVICES"] = interface  # NIXL's own parameter for it, device_list, knows RDMA devices only
        options = {"engine_config": ",".join(f"{key}={value}" for key, value in ucx.items())}
        try:
            self._raw = bindings.nixlAgent(name, config)
            self._backend = self._raw.createBackend("UCX", options)
        except Exception as error:
            raise TransportError(f"NIXL could not make an agent with the UCX backend: {describe(error)}") from None

    def register(self, regions: Sequence[Region]) -> list[Any]:
        """Register regions; returns their handles. After a TransportError the agent is spoilt: destroy it."""
        handles = []
        for device in sorted({region.device for region in regions}):
            kind, number = self._memory(device)
            rows = [(r.address, r.length_bytes, number) for r in regions if r.device == device]
            try:
                handle = self._nixl.nixlRegDList(kind, np.array(rows, np.uint64))
                self._raw.registerMem(handle, [self._backend])
            except Exception as error:
                raise TransportError(f"NIXL could not register memory on {device!r}: {describe(error)}") from None
            handles.append(handle)
        return handles

    def deregister(self, handles: Sequence[Any]) -> None:
        """Give registered memory back."""
        for handle in handles:
            try:
                self._raw.deregisterMem(handle, [self._backend])
            except Exception as error:
                raise TransportError(f"NIXL could not deregister memory: {describe(error)}") from None

    def metadata(self) -> bytes:
        """Return what peers need to read the registered memory."""
        try:
            return bytes(self._raw.getLocalMD())
        except Exception as error:
            raise TransportError(f"NIXL could not describe its agent: {describe(error)}") from None

    def add_peer(self, metadata: bytes) -> str:
        """Connect to an agent; returns its name. Does not wait for an answer."""
        try:
            return bytes(self._raw.loadRemoteMD(metadata)).decode()
        except Exception as error:
            raise TransportError(f"NIXL could not connect to the peer: {describe(error)}") from None

    def remove_peer(self, name: str) -> None:
        """Disconnect from an agent, if it is known; needed before its name is added again."""
        try:
            self._raw.invalidateRemoteMD(name)
        except Exception as error:
            raise TransportError(f"NIXL could not forget the peer: {describe(error)}") from None

    def start_read(self, peer: str, batch: Batch) -> int:
        """Post one read and return its handle; raises TransportError if nothing was posted or the post failed."""
        local = self._descriptors(batch.local, batch.length_bytes, batch.local_device)
        remote = self._descriptors(batch.remote, batch.length_bytes, batch.remote_device)
        try:
            return int(self._raw.createXferReq(self._nixl.NIXL_READ, local, remote, peer, "", [self._backend]))
        except Exception as error:
            raise TransportError(f"NIXL refused the read: {describe(error)}") from None

    def post(self, handle: int) -> bool:
        """Start a read that was made; returns whether it is done already."""
        return bool(self._raw.postXferReq(handle, "") == self._nixl.NIXL_SUCCESS)

    def done(self, handle: int) -> bool:
        """Drive transfers and return whether this one is done; raises NIXL's own exception if it failed."""
        return bool(self._raw.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Free a read's record; does not stop its bytes."""
        try:
            self._raw.releaseXferReq(handle)
        except Exception:
            return  # the record goes with the agent

    def destroy(self) -> None:
        """Destroy the agent, so that no transfer of it moves a byte; raises TransportError if that is not proven."""
        gone = weakref.ref(self._raw)
        self._raw = None
        if gone() is not None:
            gc.collect()
        if gone() is not None:
            raise TransportError("NIXL's agent is still referenced: it cannot be destroyed, end this process")

    def __del__(self) -> None:
        """Leave the agent alone in a forked child: its threads are not there, and destroying it would wait for them."""
        raw = getattr(self, "_raw", None)
        if raw is not None and os.getpid() != self._pid:
            self._leak(ctypes.py_object(raw))

    def _descriptors(self, addresses: NDArray[np.uint64], length_bytes: NDArray[np.uint64], device: str) -> Any:
        kind, number = self._memory(device)
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = length_bytes
        rows[:, 2] = number
        return self._nixl.nixlXferDList(kind, rows)

    def _memory(self, device: str) -> tuple[Any, int]:
        """Return NIXL's memory kind and device number of a torch device name."""
        if device == "cpu":
            return self._nixl.DRAM_SEG, 0
        kind, _, number = device.partition(":")
        if kind == "cuda" and (not number or number.isdecimal()):
            return self._nixl.VRAM_SEG, int(number or 0)
        raise TransportError(f"the nixl transport knows no device {device!r}: it moves 'cpu' and 'cuda:N' memory")


def describe(error: Exception) -> str:
    """Name one of NIXL's errors, whose texts say little, and where to look for more."""
    return f"{str(error) or type(error).__name__} (NIXL_LOG_LEVEL=DEBUG UCX_LOG_LEVEL=info say more)"
