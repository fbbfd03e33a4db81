"""Show how far long work is: a bar on a terminal, now and then a line elsewhere; always on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_EVERY_S = 5.0

Report = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes), from one thread at a time."""


@contextmanager
def byte_progress(title: str, console: Console | None = None) -> Iterator[Report]:
    """Yield the function to call with (done_bytes, total_bytes)."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _bar(title, console) as report:
            yield report
    else:
        yield _Lines(title, console, time.monotonic())


@contextmanager
def terminal_progress(title: str, console: Console | None = None) -> Iterator[Report | None]:
    """Yield the function to call with (done_bytes, total_bytes), None where stderr is not a terminal."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with _bar(title, console) as report:
            yield report
    else:
        yield None


@contextmanager
def _bar(title: str, console: Console) -> Iterator[Report]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield report


class _Lines:
    """Print a line every few seconds, and one at the end."""

    def __init__(self, title: str, console: Console, started: float) -> None:
        self._title, self._console = title, console
        self._started = self._printed = started
        self._ended = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._ended or (done < total and now - self._printed < LINE_EVERY_S):
            return
        self._printed, self._ended = now, done >= total
        share = f"{done / total:4.0%}" if total else "100%"
        rate = f"{decimal(int(done / max(now - self._started, 1e-9)))}/s"
        line = f"{self._title}: {share} of {decimal(total)}, {rate}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
