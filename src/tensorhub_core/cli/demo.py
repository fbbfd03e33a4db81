"""`tensorhub demo`: a hub, a trainer and three readers on this machine, for about 15 seconds."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from tensorhub_core.cli.signals import Stop
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.serving import serve

READERS = ("reader-1", "reader-2", "reader-3")
TRAINER = "trainer"
_TENSORS = 16
_PERIODS = 8
_LATE_AT = 0.4
"""When the last reader joins, as a part of the whole time."""
_START_S = 120.0
_END_S = 30.0
_STOP_S = 10.0


@dataclass
class Tally:
    """What a reader got."""

    versions: list[int] = field(default_factory=list)
    total_bytes: int = 0
    seconds: float = 0.0
    sources: Counter[str] = field(default_factory=Counter)
    wrong: int = 0


@dataclass
class Story:
    """Listen to the programs' events: tell each as a line, and keep the figures.

    `began_s` is when the first version was published.
    """

    console: Console
    began_s: float | None = None
    newest: int = 0
    failures: list[str] = field(default_factory=list)
    readers: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in READERS})

    def hear(self, event: dict[str, Any]) -> None:
        """Tell one event."""
        who = event["who"]
        if self.began_s is None:
            self.began_s = time.monotonic()
        if event["event"] == "published":
            self.newest = event["version"]
            self._line(who, f"[bold cyan]published version {self.newest}[/] in place, {decimal(event['bytes'])}")
        elif event["event"] == "unpublished":
            waited = f"{event['seconds'] * 1e3:.1f} ms"
            self._line(who, f"[dim]took version {event['version']} back after {waited}, changes it[/]")
        elif event["event"] == "filled":
            self._filled(who, event)
        else:
            self.failures.append(f"{who}: {event.get('error', 'ended too early')}")

    def everyone_has(self, version: int) -> bool:
        """Tell whether every reader holds this version or a newer one."""
        return all(tally.versions and tally.versions[-1] >= version for tally in self.readers.values())

    def held(self) -> bool:
        """Tell whether everything went as it should."""
        got = all(tally.versions and not tally.wrong for tally in self.readers.values())
        return got and not self.failures and self.everyone_has(self.newest)

    def table(self) -> Table:
        """Return the figures of all readers."""
        table = Table("reader", "versions", "bytes", "rate", "read from", "every number right")
        for name, tally in self.readers.items():
            rate = f"{decimal(int(tally.total_bytes / tally.seconds))}/s" if tally.seconds else "-"
            sources = ", ".join(f"{source} {count}x" for source, count in sorted(tally.sources.items()))
            right = "[green]yes[/]" if tally.versions and not tally.wrong else "[red]NO[/]"
            table.add_row(name, str(len(tally.versions)), decimal(tally.total_bytes), rate, sources, right)
        return table

    def _filled(self, who: str, event: dict[str, Any]) -> None:
        tally, sources = self.readers[who], ", ".join(event["sources"])
        tally.versions.append(event["version"])
        tally.total_bytes += event["bytes"]
        tally.seconds += event["seconds"]
        tally.sources.update(event["sources"])
        tally.wrong += not event["right"]
        rate = decimal(int(event["bytes"] / event["seconds"])) if event["seconds"] else "-"
        right = "every number right" if event["right"] else "[bold red]WRONG NUMBERS[/]"
        text = f"[green]<- {sources:<9}[/] version {event['version']}, {decimal(event['bytes'])}"
        self._line(who, f"{text} in {event['seconds']:.3f} s ({rate}/s), {right}")

    def _line(self, who: str, text: str) -> None:
        since_s = time.monotonic() - (self.began_s or time.monotonic())
        self.console.print(f"[dim]{since_s:5.1f} s[/]  {who:<9} {text}")


class Programs:
    """The trainer and the readers as processes; a context manager that ends them all."""

    def __init__(self, address: str, tensor_bytes: int, period_s: float) -> None:
        self._arguments = (address, str(tensor_bytes), str(period_s))
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._ending = False
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        for name in sorted(self._running, key=lambda name: name == TRAINER):  # the trainer last: it has the readers
            self._end(self._running[name])

    def start(self, name: str) -> None:
        """Start the trainer or a reader."""
        address, tensor_bytes, period_s = self._arguments
        role = "trainer" if name == TRAINER else "reader"
        command = [sys.executable, "-m", "tensorhub_core.cli.demo_worker", address, role, name]
        process = subprocess.Popen(
            [*command, str(_TENSORS), tensor_bytes, period_s],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._running[name] = process
        threading.Thread(target=self._listen, args=(name, process), name=name, daemon=True).start()

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                self.events.put(json.loads(line))
        if not self._ending:
            self.events.put({"event": "ended", "who": name})

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Close its stdin, which it takes for the end; kill it if it does not."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@click.command()
@click.option("--seconds", type=click.FloatRange(min=1), default=15.0, help="How long to publish versions. [15]")
@click.option("--megabytes", type=click.IntRange(1, 16384), default=64, help="Size of a version. [64]")
def demo(seconds: float, megabytes: int) -> None:
    """Publish versions from a trainer to three readers, all processes of this machine, and say who read from whom.

    The third reader joins late and fills from whoever has the newest version. Every reader checks every number it got.
    Exits with 1 if anything was off.
    """
    Stop()
    console = Console(highlight=False, soft_wrap=True)
    size_bytes = megabytes * 1_000_000 // _TENSORS // 4 * 4
    with serve("tcp://127.0.0.1:0") as hub, Programs(hub.address, size_bytes, seconds / _PERIODS) as programs:
        console.print(f"hub at {hub.address}; a trainer and {len(READERS)} readers, each a process of its own")
        story = Story(console)
        for name in (TRAINER, *READERS[:-1]):
            programs.start(name)
        _tell(story, programs, seconds)
        get_logger("server").setLevel(logging.ERROR)  # that its versions end with the demo is no news
    console.print(story.table())
    if not story.held():
        raise click.exceptions.Exit(1)


def _tell(story: Story, programs: Programs, seconds: float) -> None:
    """Tell events for `seconds`, then until every reader has the newest version; a failure ends it."""
    waiting, started = list(READERS[-1:]), time.monotonic()
    while not story.failures:
        since_s = 0.0 if story.began_s is None else time.monotonic() - story.began_s
        if waiting and since_s >= seconds * _LATE_AT:
            programs.start(waiting.pop())
        if since_s >= seconds and (story.everyone_has(story.newest) or since_s >= seconds + _END_S):
            return
        if story.began_s is None and time.monotonic() - started > _START_S:
            story.failures.append(f"no version was published within {_START_S:.0f} s")
        with contextlib.suppress(queue.Empty):
            story.hear(programs.events.get(timeout=0.1))
    for failure in story.failures:
        story.console.print(f"[bold red]{escape(failure)}[/]")
