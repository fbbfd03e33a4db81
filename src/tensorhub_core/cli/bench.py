"""`tensorhub bench`: how fast versions come from one process into others on this machine, over each transport."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from tensorhub_core.checkpoint.room import available_memory_bytes
from tensorhub_core.cli.common import interface_option
from tensorhub_core.cli.signals import Stop
from tensorhub_core.errors import TensorHubError
from tensorhub_core.observe.log import get_logger
from tensorhub_core.server.serving import serve
from tensorhub_core.transport.registry import TRANSPORTS, why_unavailable

PUBLISHER = "publisher"
MEASURABLE = ("auto", *TRANSPORTS)
_ANSWER_S = 120.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one transport gave; rates count 1e9 bytes that the slowest reader got, the median over versions.

    `first_gb_per_s` is the first version's, which has to connect, to plan and to take checksums; `of_a_copy` compares
    the others with numpy's copy of the same tensors inside one process. `error` says why there are none.
    """

    transport: str
    readers: int
    total_bytes: int
    first_gb_per_s: float | None = None
    gb_per_s: float | None = None
    of_a_copy: float | None = None
    publish_s: float | None = None
    unpublish_s: float | None = None
    error: str = ""


class Peer:
    """The publisher or a reader as a process of its own."""

    def __init__(
        self, address: str, name: str, transport: str, tensors: int, tensor_bytes: int, interface: str | None = None
    ) -> None:
        self.name = name
        role = PUBLISHER if name == PUBLISHER else "reader"
        command = [sys.executable, "-m", "tensorhub_core.cli.bench_worker", address, role, name, transport]
        self._process = subprocess.Popen(
            [*command, str(tensors), str(tensor_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **({"TENSORHUB_INTERFACE": interface} if interface else {})},
        )

    def order(self, what: str, version: int) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(f"{what} {version}\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last order; raises TensorHubError if there is none in time, or it is an error."""
        assert self._process.stdout is not None
        guard = threading.Timer(_ANSWER_S, self._process.kill)
        guard.start()
        try:
            line = self._process.stdout.readline()
        finally:
            guard.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended without an answer"}
        if "error" in answer:
            raise TensorHubError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, what: str, version: int) -> dict[str, Any]:
        """Send an order and wait for its answer."""
        self.order(what, version)
        return self.answer()

    def end(self) -> None:
        """Close its stdin, which it takes for the end; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@click.command()
@click.option("--megabytes", type=click.IntRange(1, 1 << 20), default=512, help="Size of a version. [512]")
@click.option("--tensors", type=click.IntRange(1, 100_000), default=300, help="How many tensors it has. [300]")
@click.option("--readers", type=click.IntRange(1, 64), default=1, help="How many read it at once. [1]")
@click.option("--versions", type=click.IntRange(2, 1000), default=6, help="How many to publish. [6]")
@click.option(
    "--transport",
    "names",
    type=click.Choice(MEASURABLE),
    multiple=True,
    help="Measure this one; again for more. [all that load]",
)
@interface_option
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(
    megabytes: int,
    tensors: int,
    readers: int,
    versions: int,
    names: tuple[str, ...],
    interface: str | None,
    as_json: bool,
) -> None:
    """Publish versions from one process and read them from others, and say how fast each transport is here.

    Everything is counted in: the hub's promise, plan, verified read, commit. The bytes of the first and the last
    version are compared. Exits with 1 if a transport failed.
    """
    Stop()
    tensor_bytes = max(1, megabytes * 1_000_000 // tensors)
    _require_memory(tensors * tensor_bytes, readers)
    chosen = names or tuple(name for name in MEASURABLE if not why_unavailable(name))
    found = [measure(name, readers, versions, tensors, tensor_bytes, interface) for name in chosen]
    if as_json:
        click.echo(json.dumps([asdict(figures) for figures in found], indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        size = decimal(tensors * tensor_bytes)
        who = f"{readers} reader{'s' * (readers > 1)}"
        console.print(f"{size} in {tensors:,} tensors, {versions} versions, {who}; all on this machine")
        console.print(_table(found))
    if any(figures.error for figures in found):
        raise click.exceptions.Exit(1)


def measure(
    transport: str, readers: int, versions: int, tensors: int, tensor_bytes: int, interface: str | None = None
) -> Figures:
    """Run a hub, a publisher and readers over one transport; what fails is said in `error`."""
    total_bytes = tensors * tensor_bytes
    try:
        with (
            serve("tcp://127.0.0.1:0", retain=0) as hub,
            _peers(hub.address, transport, readers, tensors, tensor_bytes, interface) as (publisher, others),
        ):
            publish_s, read_s, unpublish_s = _run(publisher, others, versions)
            plain_s = others[0].ask("copy", 0)["seconds"]
            get_logger("server").setLevel(logging.ERROR)  # that its version ends with the bench is no news
    except TensorHubError as error:
        return Figures(transport, readers, total_bytes, error=" ".join(str(error).split()))
    later_s = statistics.median(read_s[1:])
    return Figures(
        transport,
        readers,
        total_bytes,
        total_bytes / read_s[0] / 1e9,
        total_bytes / later_s / 1e9,
        plain_s / later_s,
        statistics.median(publish_s),
        statistics.median(unpublish_s),
    )


@contextlib.contextmanager
def _peers(
    address: str, transport: str, readers: int, tensors: int, tensor_bytes: int, interface: str | None
) -> Iterator[tuple[Peer, list[Peer]]]:
    names = [PUBLISHER, *(f"reader-{number}" for number in range(1, readers + 1))]
    with contextlib.ExitStack() as ending:
        peers: list[Peer] = []
        for name in names:
            peers.append(Peer(address, name, transport, tensors, tensor_bytes, interface))
            ending.callback(peers[-1].end)
        for peer in peers:
            peer.answer()
        yield peers[0], peers[1:]


def _run(publisher: Peer, readers: Sequence[Peer], versions: int) -> tuple[list[float], list[float], list[float]]:
    """Return what publishing, the slowest reader and unpublishing took, for each version in seconds."""
    publish_s: list[float] = []
    read_s: list[float] = []
    unpublish_s: list[float] = []
    for version in range(1, versions + 1):
        publish_s.append(publisher.ask("publish", version)["seconds"])
        for reader in readers:
            reader.order("replicate", version)
        read_s.append(max(reader.answer()["seconds"] for reader in readers))
        if version in (1, versions):
            _compare(publisher, readers)
        if version < versions:
            unpublish_s.append(publisher.ask("unpublish", version)["seconds"])
            for reader in readers:
                reader.ask("unpublish", version)
    return publish_s, read_s, unpublish_s


def _compare(publisher: Peer, readers: Sequence[Peer]) -> None:
    right = publisher.ask("digest", 0)["digest"]
    for reader in readers:
        if reader.ask("digest", 0)["digest"] != right:
            raise TensorHubError(f"{reader.name} got WRONG BYTES: report this, with what `tensorhub doctor` says")


def _require_memory(total_bytes: int, readers: int) -> None:
    """Raise UsageError if a publisher, the readers and one copy would not fit."""
    needed_bytes, left_bytes = (readers + 2) * total_bytes, available_memory_bytes()
    if left_bytes is not None and needed_bytes > left_bytes:
        text = f"{readers} readers of {decimal(total_bytes)} need {decimal(needed_bytes)} of memory, there is "
        raise click.UsageError(text + f"{decimal(left_bytes)}: give a smaller --megabytes or --readers")


def _table(found: Sequence[Figures]) -> Table:
    table = Table("transport", "GB/s", "of a plain copy", "first version", "publish", "unpublish")
    for each in found:
        if each.error:
            table.add_row(each.transport, f"[red]{escape(each.error)}[/]")
            continue
        cells = (
            f"{each.gb_per_s:.2f}",
            f"{each.of_a_copy:.0%}",
            f"{each.first_gb_per_s:.2f}",
            f"{1e3 * (each.publish_s or 0):.1f} ms",
            f"{1e3 * (each.unpublish_s or 0):.1f} ms",
        )
        table.add_row(each.transport, *cells)
    return table
