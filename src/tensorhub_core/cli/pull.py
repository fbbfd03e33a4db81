"""`tensorhub pull`: write a version from live replicas to a folder."""

from __future__ import annotations

from pathlib import Path

import click

from tensorhub_core.checkpoint.inventory import HeldBy, Inventory, take_inventory
from tensorhub_core.checkpoint.room import allocate
from tensorhub_core.checkpoint.writer import MAX_SHARD_BYTES, check_target, split_shards, write_checkpoint
from tensorhub_core.cli.common import existing_server, place_options, server_option
from tensorhub_core.cli.progress import byte_progress, terminal_progress
from tensorhub_core.cli.signals import Stop
from tensorhub_core.client.connect import connect
from tensorhub_core.client.oneshot import ask
from tensorhub_core.errors import ConfigError, TensorHubError
from tensorhub_core.layout.canonical import decode_layout
from tensorhub_core.layout.casting import check_cast
from tensorhub_core.layout.types import Layout
from tensorhub_core.settings import load_settings
from tensorhub_core.state.messages import Blob, DescribeVersion, GetBlob, VersionLayouts
from tensorhub_core.wire.curve import ClientKeys, client_keys

_LEAST_SEGMENT_BYTES = 4096


def _number(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Return the number of a version, None for `latest`."""
    return None if value == "latest" else click.IntRange(min=0)(value, param, ctx)


def _dtype(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return a dtype's full name."""
    try:
        return None if value is None else str(check_cast(value))
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command()
@click.option("--model", required=True, help="Name of the model.")
@click.option("--version", default="latest", callback=_number, help="Number of the version. [latest]")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write; absent or empty.")
@click.option("--timeout-s", type=click.FloatRange(min=0, min_open=True), help="Longest time for the transfer. [600]")
@click.option(
    "--max-shard-bytes", type=click.IntRange(min=1), default=MAX_SHARD_BYTES, help="Largest file to write. [5 GB]"
)
@click.option("--cast", callback=_dtype, help="Write floating tensors in this dtype: bf16, fp16, fp32, fp64.")
@place_options
@server_option
def pull(
    model: str,
    version: int | None,
    out: Path,
    timeout_s: float | None,
    max_shard_bytes: int,
    cast: str | None,
    server: str | None,
    place: dict[str, str | None],
) -> None:
    """Write a version, fetched from whoever holds it, as safetensors files to a folder.

    The folder appears with everything in it, or not at all. Prints `pulled MODEL VERSION to FOLDER`.
    """
    Stop()
    target = check_target(out)
    address, settings = existing_server(server, **place)
    inventory = find_inventory(address, model, version, settings.client.connect_timeout_s, client_keys(settings.client))
    if cast is not None:
        inventory = inventory.in_dtype(cast)
    tensors, total_bytes = allocate(inventory, target)
    split_shards(tensors, max_shard_bytes)  # refuses what cannot be stored before anything is transferred
    segment_bytes = max(_LEAST_SEGMENT_BYTES, inventory.segment_bytes)
    options = load_settings(cli={"server": address, "segment_bytes": segment_bytes, **place})
    with (
        connect(address, model=model, spot=True, cast=cast or False, settings=options) as worker,
        byte_progress(f"pulling {model}") as report,
    ):
        worker.register((tensor.name, tensor) for tensor in tensors)
        got = worker.replicate(
            "latest" if version is None else version,
            timeout_s=timeout_s,
            progress=lambda done, total, _: report(done, total),
            publish=False,
        )
        report(total_bytes, total_bytes)
    with terminal_progress("writing") as report:
        write_checkpoint(target, tensors, max_shard_bytes=max_shard_bytes, progress=report)
    click.echo(f"pulled {model} {int(got)} to {target}")


def find_inventory(
    address: str, model: str, version: int | None, timeout_s: float, keys: ClientKeys | None = None
) -> Inventory:
    """Ask the server who holds the version (None = latest) in which layouts, and return its whole tensors.

    Raises VersionUnavailable if nobody holds it whole, LayoutMismatch if its layouts do not add up to whole tensors.
    """
    described = ask(address, DescribeVersion(version), timeout_s=timeout_s, model=model, keys=keys)
    if not isinstance(described, VersionLayouts):
        raise TensorHubError(f"the server at {address} answered with {type(described).__name__}")
    digests = {held.layout for held in described.layouts}
    layouts = {digest: _layout(address, model, digest, timeout_s, keys) for digest in digests}
    return take_inventory([HeldBy(held.replica, layouts[held.layout], held.converted) for held in described.layouts])


def _layout(address: str, model: str, digest: bytes, timeout_s: float, keys: ClientKeys | None) -> Layout:
    blob = ask(address, GetBlob(digest), timeout_s=timeout_s, model=model, keys=keys)
    if not isinstance(blob, Blob):
        raise TensorHubError(f"the server at {address} answered with {type(blob).__name__}")
    return decode_layout(blob.data)
