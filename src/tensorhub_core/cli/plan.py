"""`tensorhub plan`: show what an engine would read of a trainer, before anything moves."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tensorhub_core.cli.common import printable, server_option
from tensorhub_core.cli.layouts import HELP, find_layouts
from tensorhub_core.cli.status import wide_console
from tensorhub_core.client.exactness import Exactness
from tensorhub_core.client.executor import STAGING_LIMIT_BYTES
from tensorhub_core.client.flow import FlowSettings
from tensorhub_core.errors import ConfigError, LayoutMismatch
from tensorhub_core.layout.casting import Cast, check_cast
from tensorhub_core.layout.plan import ExactPolicy, ReadPlan, plan_read
from tensorhub_core.layout.summary import PlanSummary, reads_of, summarize
from tensorhub_core.layout.types import Layout
from tensorhub_core.settings import load_settings

MAX_TOLD = 100
"""Differences of a shard that are printed for people."""


@dataclass(frozen=True, slots=True)
class Planned:
    """How one shard is filled from `sources`, or why it cannot be."""

    layout: Layout
    sources: tuple[Layout, ...]
    plan: ReadPlan | None = None
    summary: PlanSummary | None = None
    plan_s: float = 0.0
    staging_bytes: int = 0
    differences: tuple[str, ...] = ()


@click.command(epilog=HELP)
@click.option("--from", "source", required=True, metavar="LAYOUT", help="All shards of who holds the weights.")
@click.option("--to", "destination", required=True, metavar="LAYOUT", help="All shards, or some, of who wants them.")
@click.option("--whole-segments", is_flag=True, help="Plan for sources that give no checksums of parts of segments.")
@click.option("--cast", help="Dtypes that the reader converts, as of `connect()`: true, or one such as bf16. [none]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--out", type=click.Path(path_type=Path), help="Write every read to a file too, one JSON object a line.")
@server_option
def plan(
    source: str,
    destination: str,
    whole_segments: bool,
    cast: str | None,
    as_json: bool,
    out: Path | None,
    server: str | None,
) -> None:
    """Show what each shard of one layout would read of the shards of another one: no byte of a weight moves.

    Exits with 1 and lists all differences if the layouts do not fit.
    """
    settings = load_settings(cli={"server": server})
    sources = find_layouts(source, settings, server).layouts
    wanted = find_layouts(destination, settings, server).layouts
    policy = None if whole_segments else Exactness.of(settings.client).policy
    window = settings.client.window
    casting = cast is not None and check_cast({"true": True, "false": False}.get(cast, cast))
    planned = [plan_shard(each, sources, policy, window, casting) for each in wanted]
    if out is not None:
        write_reads(out, planned)
    if as_json:
        json.dump(document_of(planned), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        if any(each.summary for each in planned):
            wide_console().print(render(planned))
        tell_differences(planned)
    if any(each.summary is None for each in planned):
        raise click.exceptions.Exit(1)


def plan_shard(
    layout: Layout, sources: Sequence[Layout], policy: ExactPolicy | None, window: int, cast: Cast = False
) -> Planned:
    """Plan as a worker does: from sources of its own layout as they are, else from all through boxes."""
    equal = tuple(each for each in sources if each == layout)
    used = equal or tuple(sources)
    began = time.perf_counter()
    try:
        found = plan_read(layout, used, exact=policy, cast=cast)
    except LayoutMismatch as error:
        return Planned(layout, used, differences=error.differences or (str(error),))
    took_s = time.perf_counter() - began
    summary = summarize(found, layout, used)
    return Planned(layout, used, found, summary, took_s, staging_bytes(summary, window))


def staging_bytes(summary: PlanSummary, window: int) -> int:
    """Return the host memory that the reader takes for what it stages."""
    if not summary.staged_bytes:
        return 0
    slot = max(summary.largest_staged_bytes, FlowSettings().chunk_bytes)
    return slot * max(1, min(2 * window, STAGING_LIMIT_BYTES // slot))


def document_of(planned: Sequence[Planned]) -> dict[str, object]:
    """Return everything for JSON."""
    fits = all(each.summary is not None for each in planned)
    return {"fits": fits, "shards": [shard_document(each) for each in planned]}


def shard_document(each: Planned) -> dict[str, object]:
    """Return one shard's plan, or why there is none, for JSON."""
    shard: dict[str, object] = {"shard": each.layout.shard, "num_shards": each.layout.num_shards}
    if each.summary is None:
        return {**shard, "differences": each.differences}
    return {**shard, **each.summary.as_dict(), "staging_bytes": each.staging_bytes, "plan_s": each.plan_s}


def write_reads(out: Path, planned: Sequence[Planned]) -> None:
    """Write a line for each shard, and one for each of its reads behind it; raises ConfigError if that fails."""
    try:
        with out.open("w", encoding="utf-8") as file:
            for each in planned:
                file.write(json.dumps(shard_document(each)) + "\n")
                if each.plan is not None:
                    file.writelines(json.dumps(row) + "\n" for row in reads_of(each.plan, each.layout, each.sources))
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None


def render(planned: Sequence[Planned]) -> RenderableType:
    """Lay the plans out for people."""
    columns = (
        "shard",
        "needs",
        "reads",
        "ratio",
        "segments",
        "cuts",
        "runs",
        "in place",
        "staged",
        "staging",
        "planned in",
    )
    table = Table(*columns, box=None, header_style="dim", pad_edge=False)
    parts = Table("shard", "reads from", "bytes", "reads", "runs", box=None, header_style="dim", pad_edge=False)
    for each in planned:
        summary = each.summary
        if summary is None:
            continue
        shard = f"{each.layout.shard} of {each.layout.num_shards}"
        cells = (
            shard,
            decimal(summary.needed_bytes),
            decimal(summary.read_bytes),
            f"{summary.ratio:.3f}",
            f"{summary.segments:,}",
            f"{summary.cuts:,}",
            f"{summary.runs:,}",
            _share(summary.direct_bytes, summary.read_bytes),
            _share(summary.staged_bytes, summary.read_bytes),
            decimal(each.staging_bytes),
            f"{each.plan_s * 1e3:,.1f} ms",
        )
        table.add_row(*map(Text, cells))
        for row in summary.sources:
            who = f"any of {len(each.sources)} of the same layout" if summary.raw else f"shard {row.shard}"
            parts.add_row(*map(Text, (shard, who, decimal(row.read_bytes), f"{row.reads:,}", f"{row.runs:,}")))
    return Group(table, Text(), parts)


def tell_differences(planned: Sequence[Planned]) -> None:
    """Print on stderr why shards cannot be filled: of each, as much as people read."""
    differing = [each for each in planned if each.summary is None]
    if differing:
        count = sum(len(each.differences) for each in differing)
        click.echo(f"Error: the layouts do not fit: {count} difference{'s' * (count != 1)}", err=True)
    for each in differing:
        shard = f"shard {each.layout.shard} of {each.layout.num_shards}"
        for line in each.differences[:MAX_TOLD]:
            click.echo(f"- {shard}: {printable(line)}", err=True)
        if len(each.differences) > MAX_TOLD:
            click.echo(f"- {shard}: ... and {len(each.differences) - MAX_TOLD:,} more: --json lists all", err=True)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
