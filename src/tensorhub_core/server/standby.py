"""Settle by a locked file which of several servers serves, and by the counter in it which life of it that is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tensorhub_core.errors import ConfigError
from tensorhub_core.server.files import free_lock, same_file, take_lock
from tensorhub_core.state.bounds import MOST_SERVER_EPOCH

LOOK_EVERY_S = 0.1
_DIGITS = 20
"""The counter has a fixed width and is written in place, in one piece: another file would not be the locked one."""


class ServerLock:
    """The locked file: whoever holds it serves, with the counter in it as the server's epoch."""

    def __init__(self, path: Path, handle: int, at_least: int) -> None:
        """Raise the counter of a file that was just locked; raises ConfigError if it cannot be one of ours."""
        self._path, self._handle = path, handle
        self.epoch = min(max(self._read() + 1, at_least), MOST_SERVER_EPOCH)
        self._write(self.epoch)

    def lost(self) -> str | None:
        """Return why this server must not serve any more, None while the lock is its own."""
        if not same_file(self._handle, self._path):
            return f"the lock file {self._path} was removed or replaced"
        try:
            counter = self._read()
        except ConfigError as error:
            return str(error)
        if counter != self.epoch:
            return f"the counter in {self._path} is {counter}, and this server's {self.epoch}"
        return None

    def raise_to(self, epoch: int) -> None:
        """Let the next life have a higher epoch than one that was heard of, if the lock still is ours."""
        if self.lost() is None and self.epoch < epoch < MOST_SERVER_EPOCH:
            self._write(epoch)

    def release(self) -> None:
        """Let another server have the file."""
        free_lock(self._handle)

    def _read(self) -> int:
        try:
            text = os.pread(self._handle, _DIGITS + 2, 0)
        except OSError as error:
            raise ConfigError(f"the lock file {self._path} cannot be read: {error.strerror}") from None
        if not text:
            return 0
        if len(text) != _DIGITS + 1 or not text[:-1].isdigit() or text[-1:] != b"\n":
            raise ConfigError(f"{self._path} is not a lock file of `tensorhub serve --lock`: it holds something else")
        return int(text)

    def _write(self, counter: int) -> None:
        try:
            os.pwrite(self._handle, b"%0*d\n" % (_DIGITS, counter), 0)
            os.fsync(self._handle)
        except OSError as error:
            raise ConfigError(f"the lock file {self._path} cannot be written: {error.strerror}") from None


def wait_for_lock(
    path: Path, *, at_least: Callable[[], int], stopped: Callable[[], bool], waiting: Callable[[], None]
) -> ServerLock | None:
    """Wait until this process has the file, and return it; None once `stopped()`. `waiting()` is called once.

    `at_least()` is asked then for the lowest epoch that may be: a new file, with no counter, must not lead back.
    Raises ConfigError if the file cannot be used.
    """
    told = False
    while not stopped():
        try:
            handle = take_lock(path)
        except OSError as error:
            raise ConfigError(f"the lock file {path} cannot be used: {error.strerror}") from None
        if handle is not None:
            if same_file(handle, path):
                return _lock(path, handle, at_least())
            free_lock(handle)  # it was replaced while this process took it
            continue
        if not told:
            told = True
            waiting()
        time.sleep(LOOK_EVERY_S)
    return None


def _lock(path: Path, handle: int, at_least: int) -> ServerLock:
    try:
        return ServerLock(path, handle, at_least)
    except BaseException:
        free_lock(handle)
        raise
