"""Be the embedded hub: take the lock, count the epoch, listen, and end when nobody needs it any more."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from tensorhub_core.clock import Clock
from tensorhub_core.config import ServerConfig
from tensorhub_core.errors import ServerUnreachable
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.embedded import ADDRESS_FILE, HubRecord, live_address, read_record, socket_path
from tensorhub_core.server.files import free_lock, same_file, take_lock, write_atomically
from tensorhub_core.server.loop import ServerLoop
from tensorhub_core.server.options import machine_config
from tensorhub_core.server.serving import epoch_now
from tensorhub_core.state.bounds import MOST_SERVER_EPOCH

LOCK_FILE = "lock"
FIRST_WORKER_S = 10.0
"""A hub that was just started waits at least this long for the worker it was started for."""
LINGER_S = 0.5
"""After it took its address back, a hub still serves those who had read it before."""
TOUCH_EVERY_S = 3600.0
MOST_SOCKET_PATH_BYTES = 100


class Idle(Enum):
    """What an idle hub does next."""

    STAY = "stay"
    WITHDRAW = "withdraw"
    OFFER = "offer"
    END = "end"


@dataclass(slots=True)
class IdlePolicy:
    """Decide when a hub ends: `idle_s` after the last worker left, in two steps so that no newcomer is lost."""

    idle_s: float
    since_s: float
    first: bool = True
    withdrawn_s: float | None = None
    hellos: int = 0

    def look(self, now: float, workers: int, hellos: int) -> Idle:
        """Say what to do at monotonic time `now` with so many workers, and hellos since the hub's start."""
        if workers or hellos > self.hellos:
            self.since_s, self.first, self.hellos = now, False, hellos
            if self.withdrawn_s is None:
                return Idle.STAY
            self.withdrawn_s = None
            return Idle.OFFER
        if self.withdrawn_s is not None:
            return Idle.END if now - self.withdrawn_s >= LINGER_S else Idle.STAY
        if now - self.since_s < (max(self.idle_s, FIRST_WORKER_S) if self.first else self.idle_s):
            return Idle.STAY
        self.withdrawn_s = now
        return Idle.WITHDRAW


class Hub:
    """The embedded hub of one runtime folder; the caller holds its lock."""

    def __init__(self, folder: Path, lock: int, server: ServerConfig, clock: Clock) -> None:
        self._folder, self._lock, self._clock = folder, lock, clock
        for old in (folder / ADDRESS_FILE, *folder.glob("*.sock"), *folder.glob("*.sock.lock")):
            old.unlink(missing_ok=True)
        self.epoch = next_epoch(folder, epoch_now())
        self._far_folder: Path | None = None
        self.loop = ServerLoop(machine_config(server, self.epoch), f"ipc://{self._socket_path()}", clock=clock)
        self._policy = IdlePolicy(server.idle_s, clock.now())
        self._touched_s = clock.now()
        self.offer()

    def offer(self) -> None:
        """Write the address file."""
        record = HubRecord(self.loop.address, os.getpid(), self.epoch)
        write_atomically(self._folder / ADDRESS_FILE, msgspec.json.encode(record))

    def withdraw(self) -> None:
        """Remove the address file if it is this hub's."""
        record = read_record(self._folder)
        if record is not None and record.epoch == self.epoch:
            (self._folder / ADDRESS_FILE).unlink(missing_ok=True)

    def run(self) -> None:
        """Serve until `loop.stop()` is called or nobody needs the hub any more, and clean up."""
        get_logger("server").info("embedded hub listening on %s, epoch %d", self.loop.address, self.epoch)
        try:
            self.loop.run(self._watch)
        finally:
            self.withdraw()
            self.loop.close()
            path = socket_path(self.loop.address)
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
            if self._far_folder is not None:
                shutil.rmtree(self._far_folder, ignore_errors=True)
            get_logger("server").info("embedded hub ended; %s", self.loop.counters)

    def _watch(self, now: float) -> bool:
        workers = self.loop.workers()
        if not same_file(self._lock, self._folder / LOCK_FILE):
            # Somebody removed the folder's files: a new hub may be there by now. Those who are here are served on.
            return workers == 0
        if now - self._touched_s >= TOUCH_EVERY_S:
            self._touched_s = now
            self._touch()
        decision = self._policy.look(now, workers, self.loop.counters.hellos)
        if decision is Idle.WITHDRAW:
            self.withdraw()
        elif decision is Idle.OFFER:
            self.offer()
        return decision is Idle.END

    def _touch(self) -> None:
        """Keep cleaners of temporary folders away from the files of a long-lived hub."""
        for path in (self._folder, *self._folder.iterdir()):
            with contextlib.suppress(OSError):
                os.utime(path)

    def _socket_path(self) -> Path:
        """Return a path that no other life of the hub has, and that is short enough for a Unix socket."""
        path = self._folder.absolute() / f"{self.epoch}.sock"
        if len(os.fsencode(path)) <= MOST_SOCKET_PATH_BYTES:
            return path
        self._far_folder = Path(tempfile.mkdtemp(prefix="tensorhub-", dir="/tmp"))
        return self._far_folder / path.name


def take_hub_lock(folder: Path, timeout_s: float) -> int | str:
    """Return the lock's handle, or the address of the hub that has it; raises ServerUnreachable after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        lock = take_lock(folder / LOCK_FILE)
        if lock is not None:
            if same_file(lock, folder / LOCK_FILE):
                return lock
            free_lock(lock)
        address = live_address(folder)
        if address is not None:
            return address
        if time.monotonic() >= deadline:
            record = read_record(folder)
            who = f"process {record.pid}" if record else "a process"
            raise ServerUnreachable(f"{who} holds {folder / LOCK_FILE} but does not listen: end it, or wait")
        time.sleep(0.02)


def next_epoch(folder: Path, at_least: int) -> int:
    """Count the hub's lives in a file beside the lock, never below `at_least`, so that a lost file loses nothing."""
    path = folder / "epoch"
    try:
        last = int(path.read_bytes())
    except (OSError, ValueError):
        last = 0
    epoch = max(last + 1, at_least) if last < MOST_SERVER_EPOCH else at_least  # else the file is damaged
    write_atomically(path, b"%d" % epoch)
    return epoch


def run_hub(
    folder: Path, server: ServerConfig, *, clock: Clock, timeout_s: float, ready: Callable[[str, Hub | None], None]
) -> None:
    """Run the hub of `folder` until it ends; `ready(address, hub)` is called once, with None if another hub runs."""
    lock = take_hub_lock(folder, timeout_s)
    if isinstance(lock, str):
        return ready(lock, None)
    try:
        hub = Hub(folder, lock, server, clock)
        ready(hub.loop.address, hub)
        hub.run()
    finally:
        free_lock(lock)
