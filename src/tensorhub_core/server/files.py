"""File locks, Unix sockets and atomic files: what processes of one machine agree by."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path


def take_lock(path: Path) -> int | None:
    """Take a file lock without waiting; return its handle, or None if another process has it.

    The kernel frees it when the process ends, however it ends.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def free_lock(handle: int) -> None:
    """Free a file lock, also for copies of its handle that a process forked meanwhile may have."""
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def same_file(handle: int, path: Path) -> bool:
    """Tell whether `path` still names the open file, and not nothing or another one."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file, readable by its user only: whoever reads it, even after a crash, finds the old or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    draft.replace(path)


def accepts(path: Path) -> bool:
    """Tell whether a process listens on this Unix socket."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue of connections is full
        except (OSError, ValueError):
            return False
        return True
