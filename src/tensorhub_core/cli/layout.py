"""`tensorhub layout`: show what lies in which shard, or save it for `tensorhub plan`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from tensorhub_core.checkpoint.formats import FORMATS, OpenOptions
from tensorhub_core.checkpoint.names_file import read_names
from tensorhub_core.cli.common import printable, server_option
from tensorhub_core.cli.layouts import HELP, find_layouts, save_layouts
from tensorhub_core.cli.status import wide_console
from tensorhub_core.layout.canonical import digest_of, encode_layout
from tensorhub_core.layout.segments import segment_table
from tensorhub_core.layout.types import Layout
from tensorhub_core.settings import load_settings


@click.command(epilog=HELP)
@click.argument("layout", metavar="LAYOUT")
@click.option(
    "--out", type=click.Path(path_type=Path), help="File to save it to; a folder if there are several shards."
)
@click.option("--json", "as_json", is_flag=True, help="Print every tensor and box as JSON.")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Format of a checkpoint folder.")
@click.option("--prefix", help="As of `tensorhub publish`.")
@click.option("--names", type=click.Path(path_type=Path), help="As of `tensorhub publish`.")
@click.option("--hf-config", type=click.Path(path_type=Path), help="As of `tensorhub publish`.")
@server_option
def layout(
    layout: str,
    out: Path | None,
    as_json: bool,
    kind: str | None,
    prefix: str | None,
    names: Path | None,
    hf_config: Path | None,
    server: str | None,
) -> None:
    """Show what lies in which shard of LAYOUT, or save it: no byte of a weight is read.

    A saved layout is what the hub keeps of a registered shard: names, shapes, boxes, no addresses.
    """
    renamed = None if names is None else read_names(names)
    options = OpenOptions(prefix, renamed, hf_config)
    found = find_layouts(layout, load_settings(cli={"server": server}), server, options, kind).layouts
    if out is not None:
        for file in save_layouts(found, out):
            click.echo(f"saved {file}")
    elif as_json:
        text = msgspec.json.encode([_document(each) for each in found])
        sys.stdout.write(msgspec.json.format(text).decode() + "\n")
    else:
        wide_console().print(table_of(found))


def table_of(layouts: tuple[Layout, ...]) -> Table:
    """Return a row a shard."""
    columns = ("shard", "tensors", "boxes", "bytes", "segments", "dtypes", "form", "fingerprint")
    table = Table(*columns, box=None, header_style="dim", pad_edge=False)
    for each in layouts:
        segments = segment_table(each)
        boxes = sum(len(spec.boxes) for spec in each.tensors if spec.boxes is not None)
        cells = (
            f"{each.shard} of {each.num_shards}",
            f"{len(each.tensors):,}",
            f"{boxes:,}",
            decimal(segments.total_bytes),
            f"{len(segments):,}",
            ", ".join(sorted({spec.dtype for spec in each.tensors})),
            printable(each.tag) or "as named",
            digest_of(encode_layout(each)).hex(),
        )
        table.add_row(*map(Text, cells))
    return table


def _document(each: Layout) -> dict[str, object]:
    """Return a layout by names."""
    tensors = [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": spec.shape,
            "boxes": None
            if spec.boxes is None
            else [
                {"logical": b.logical, "offset": b.offset, "shape": b.shape, "local_offset": b.local_offset}
                for b in spec.boxes
            ],
        }
        for spec in each.tensors
    ]
    shared = [[each.tensors[n].name for n in group] for group in each.storages if len(group) > 1]
    return {
        "shard": each.shard,
        "num_shards": each.num_shards,
        "tag": each.tag,
        "segment_bytes": each.segment_bytes,
        "checksum": each.checksum,
        "fingerprint": digest_of(encode_layout(each)).hex(),
        "shared": shared,
        "tensors": tensors,
    }
