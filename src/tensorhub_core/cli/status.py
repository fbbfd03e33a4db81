"""`tensorhub status`: what the server knows, for people or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tensorhub_core.cli import tree
from tensorhub_core.cli.common import existing_server, printable, server_option
from tensorhub_core.client.oneshot import ask
from tensorhub_core.errors import ServerUnreachable, TensorHubError
from tensorhub_core.state.messages import GetStatus, ModelStatus, ReplicaStatus, ShardStatus, StatusReply
from tensorhub_core.wire.curve import ClientKeys, client_keys

WATCH_EVERY_S = 1.0
MOST_ROWS = 200
"""Shards in the table of a model."""
_STYLES = {"published": "green", "filling": "cyan", "draining": "yellow", "suspected": "red", "dirty": "red"}
_BAR_CELLS = 10
_WIDE = 1000


@click.command()
@click.argument("model", required=False)
@click.option("--watch", is_flag=True, help="Show it again every second until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch one object a line.")
@server_option
def status(model: str | None, watch: bool, as_json: bool, server: str | None) -> None:
    """Show models, versions, replicas, shards, progress, who reads from whom, and bytes per second."""
    address, settings = existing_server(server)
    timeout_s, keys = settings.client.connect_timeout_s, client_keys(settings.client)
    if not watch:
        reply = fetch(address, model, timeout_s, keys)
        print_json(address, reply, indent=2) if as_json else wide_console().print(render(address, reply))
        return
    with contextlib.suppress(KeyboardInterrupt):
        watch_status(address, model, timeout_s, as_json, keys)


def wide_console() -> Console:
    """Return where to print: where no terminal sets a width, lines are as long as they are."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


def fetch(address: str, model: str | None, timeout_s: float, keys: ClientKeys | None = None) -> StatusReply:
    """Ask the server; raises TensorHubError if it does not know the model."""
    reply = ask(address, GetStatus(model), timeout_s=timeout_s, keys=keys)
    if not isinstance(reply, StatusReply):
        raise TensorHubError(f"the server at {address} answered with {type(reply).__name__}")
    if model is not None and not reply.models:
        raise TensorHubError(f"the server at {address} knows no model {model!r}: `tensorhub status` lists all")
    return reply


def watch_status(
    address: str, model: str | None, timeout_s: float, as_json: bool, keys: ClientKeys | None = None
) -> None:
    """Show the status again and again; a server that is away for a while does not end it."""
    fetch(address, None, timeout_s, keys)
    if as_json:
        for reply in replies(address, model, timeout_s, keys):
            if isinstance(reply, StatusReply):
                print_json(address, reply, indent=None)
        return
    console = wide_console()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        for reply in replies(address, model, timeout_s, keys):
            shown = Text(str(reply), style="red") if isinstance(reply, TensorHubError) else render(address, reply)
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)


def replies(
    address: str, model: str | None, timeout_s: float, keys: ClientKeys | None = None
) -> Iterator[StatusReply | TensorHubError]:
    """Yield a reply, or what is wrong, every second."""
    while True:
        started = time.monotonic()
        try:
            reply = ask(address, GetStatus(model), timeout_s=timeout_s, keys=keys)
            if isinstance(reply, StatusReply):
                yield reply
        except ServerUnreachable as error:
            yield error
        time.sleep(max(0.0, WATCH_EVERY_S - (time.monotonic() - started)))


def print_json(address: str, reply: StatusReply, indent: int | None) -> None:
    """Print the status in the shape that programs rely on."""
    document = {
        "server": {"address": address, "epoch": reply.server_epoch, "uptime_s": reply.uptime_s},
        "models": msgspec.to_builtins(reply.models),
    }
    sys.stdout.write(json.dumps(document, indent=indent) + "\n")
    sys.stdout.flush()


def render(address: str, reply: StatusReply) -> RenderableType:
    """Lay the status out for people."""
    head = Text.assemble((address, "bold"), f"  epoch {reply.server_epoch}  up {duration(reply.uptime_s)}")
    if not reply.models:
        return Group(head, Text("no models yet", style="dim"))
    parts: list[RenderableType] = [head]
    for model in reply.models:
        parts += [Text(), model_head(model), versions_table(model), replicas_table(model), *motion(model)]
    return Group(*parts)


def model_head(model: ModelStatus) -> Text:
    """Return the line above a model's tables."""
    stream = f"  stream {printable(model.stream)}" if model.stream is not None else ""
    latest = "nothing whole yet" if model.latest is None else f"latest {model.latest}"
    return Text.assemble((printable(model.model), "bold"), f"  {latest}{stream}  epoch {model.epoch}")


def versions_table(model: ModelStatus) -> Table:
    """Return one row a version."""
    table = Table("version", "whole", "retained", "replicas", box=None, header_style="dim", pad_edge=False)
    for row in sorted(model.versions, key=lambda row: -row.version):
        names = ", ".join(printable(name) for name in row.replicas)
        table.add_row(str(row.version), _yes(row.whole), _yes(row.retained), Text(names))
    return table


def replicas_table(model: ModelStatus) -> Table:
    """Return one row a shard; what belongs to the whole replica is said once."""
    columns = ("replica", "zone", "host", "shard", "version", "state", "progress", "reads from", "rate")
    table = Table(*columns, box=None, header_style="dim", pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # long names often differ at their ends only
    rows = [(replica, index) for replica in model.replicas for index in range(len(replica.shards))]
    for replica, index in rows[:MOST_ROWS]:
        about = replica_cells(replica) if index == 0 else ("", "", "")
        table.add_row(*(Text(cell) for cell in about), *shard_cells(replica.shards[index]))
    if len(rows) > MOST_ROWS:
        table.add_row(Text(f"and {len(rows) - MOST_ROWS:,} shards more: --json has all", style="dim"))
    return table


def motion(model: ModelStatus) -> list[RenderableType]:
    """Return the trees of what is being read, and who waits for what; nothing when everything rests."""
    parts: list[RenderableType] = []
    for version_tree in tree.trees_of(model):
        head = f"version {version_tree.version}: {version_tree.readers:,} reading"
        drawn = Tree(Text(head, style="bold"), guide_style="dim")
        _draw(drawn, tree.lines_of(version_tree))
        parts += [Text(), drawn]
    rows = [f"waiting for {what}: {tree.names(who)}" for what, who in sorted(tree.waiting(model).items())]
    rows += [f"late, nobody waits for them: {tree.names(found)}"] if (found := tree.late(model)) else []
    return parts + [Text(printable(row), style="yellow") for row in rows]


def _draw(drawn: Tree, lines: list[tree.Line]) -> None:
    for line in lines:
        _draw(drawn.add(line_text(line)), line.children)


def line_text(line: tree.Line) -> Text:
    """Return a line of a tree."""
    if line.node is None and line.folded:
        states = ", ".join(f"{count:,} {state}" for state, count in line.folded.most_common())
        return Text(f"and {line.folded.total():,} more ({states})", style="dim")
    if line.node is None:
        return Text.assemble((printable(line.place), "bold"), ("  over the WAN", "magenta") if line.wan else "")
    node = line.node
    where = f"{len(node.hosts)} hosts" if len(node.hosts) > 1 else printable(node.host)
    parts = [printable(node.replica) + (" (seed agent)" if node.seeds else ""), f"[{where}]" if where else ""]
    text = Text("  ".join(part for part in parts if part) + "  ")
    text.append(node.state, style=_STYLES.get(node.state, "yellow"))
    if node.sources and node.total_bytes:
        text.append(f"  {min(1.0, node.done_bytes / node.total_bytes):.0%} of {decimal(node.total_bytes)}")
    if node.bytes_per_s:
        text.append(f"  {decimal(int(node.bytes_per_s))}/s")
    if node.sources[1:]:
        also = [edge.replica + (" over the WAN" if edge.wan else "") for edge in node.sources[1:]]
        text.append(f"  also from {printable(tree.names(also))}")
    return text


def replica_cells(replica: ReplicaStatus) -> tuple[str, str, str]:
    """Return the cells of a replica."""
    name = printable(replica.replica) + (" (spot)" if replica.spot else "")
    return name, printable(replica.zone), printable(replica.host)


def shard_cells(shard: ShardStatus) -> tuple[Text, ...]:
    """Return the cells of a shard."""
    rate = f"{decimal(int(shard.bytes_per_s))}/s" if shard.bytes_per_s else ""
    return (
        Text(str(shard.shard)),
        Text("" if shard.version is None else str(shard.version)),
        Text(shard.state, style=_STYLES.get(shard.state, "")),
        Text(progress(shard)),
        Text(printable(shard.source or "")),
        Text(rate),
    )


def progress(shard: ShardStatus) -> str:
    """Return how much of the shard is there: a bar while it fills."""
    total = decimal(shard.total_bytes) if shard.total_bytes else ""
    if shard.state != "filling" or not shard.total_bytes:
        return total
    share = min(1.0, shard.done_bytes / shard.total_bytes)
    full = int(share * _BAR_CELLS)
    return f"{'█' * full}{'░' * (_BAR_CELLS - full)} {share:4.0%} of {total}"


def duration(seconds: float) -> str:
    """Return seconds in the two largest units."""
    left = int(seconds)
    units = [(left // 86400, "d"), (left // 3600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next((i for i, (count, _) in enumerate(units) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])


def _yes(value: bool) -> str:
    return "yes" if value else "no"
