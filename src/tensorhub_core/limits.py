"""Ask the system for threads and files, and say it as one of our errors when it has none left."""

from __future__ import annotations

import os
import threading

from tensorhub_core.errors import TransportError

ZMQ_FILES = 16
"""A ZeroMQ context with two sockets and a connection opens about twelve, and ends the process where it gets none."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raises TransportError if the system allows no more of them."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise TransportError(
            f"the thread {thread.name!r} cannot be started ({error}): raise the limits on threads and memory of this "
            "process or container, or end other threads"
        ) from None


def check_files(count: int, what: str) -> None:
    """Raise TransportError unless this process may open `count` more files: libraries end it when they may not."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
    except OSError as error:
        raise TransportError(no_files(what, error)) from None
    finally:
        for number in opened:
            os.close(number)


def no_files(what: str, error: Exception) -> str:
    """Say that a thing could not be opened, and what helps."""
    reason = getattr(error, "strerror", None) or error
    return f"{what} cannot be opened ({reason}): raise the limit on open files (ulimit -n)"
